"""What data parallelism issues, when, in which order, how many bytes: no loss curve shows any of this."""

import itertools
import os

import pytest
import torch
from torch import nn

from common import collectives
from common.config import TrainConfig
from common.model import Decoder
from common.start import environment
from step02_data_parallel.data_parallel import DataParallel
from step02_data_parallel.data_parallel import fill_buckets as fill_with_parameters
from step02_data_parallel.train import build, train
from tests.harness.accounting import fill_buckets
from tests.harness.observing import configure, mesh_of, observe_each, watching
from tests.harness.ranks import run_ranks

BUCKET_MB = 0.02
SHAPE = f"--layers 3 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 256 --seq-len 16 --bucket-mb {BUCKET_MB}"
SHAPE += " --data synthetic --device cpu --steps 1 --micro-batch 1 --peak-tflops 1"

# ---- what train() issues: how many, how large, when, in which order --------------------------------------------------


def configuration(flags: str, world: int) -> TrainConfig:
    return configure(2, f"{SHAPE} --global-batch {3 * world} {flags}", world)


def watch_train(flags: str) -> list[tuple]:
    """The calls of a run of step 2's train() on this rank: (phase, op, group, elements, dtype, bytes, gradients that
    had been computed by then, of all parameters and micro-batches since the beginning of the run, calls in flight)."""
    config, computed, in_flight = configuration(flags, environment().world_size), [], []
    with watching(DataParallel, "accumulate", lambda self, parameter, _: computed.append(parameter)):
        with collectives.record(
            clock=lambda: len(computed),
            launched=lambda *_: in_flight.append(sum(call.wait_end is None for call in calls)),
        ) as calls:
            train(config, mesh_of(config))
    return [
        (call.phase, call.op, call.group, call.elements, call.dtype, call.bytes, call.issue, together)
        for call, together in zip(calls, in_flight, strict=True)
        if call.phase != "setup"
    ]


def buckets_by_formula(flags: str) -> list[list[int]]:
    """Elements of the tensors in each bucket."""
    config = configuration(flags, 1)
    sizes = [parameter.numel() for parameter in Decoder(config.model_config).parameters()]
    limit = BUCKET_MB * 1e6 / 4 if config.dp_mode == "bucket" else 0
    return [[sizes[index] for index in bucket] for bucket in fill_buckets(sizes, limit)]


def check_train(calls: list[tuple], flags: str, world: int) -> None:
    """Raise AssertionError unless each step all-reduces each bucket once, in order, and as early as it can."""
    config, buckets = configuration(flags, world), buckets_by_formula(flags)
    tensors, last, calls = sum(map(len, buckets)), config.accumulation_steps - 1, iter(calls)
    for step in range(config.steps):
        ready = (step * (last + 1) + last) * tensors  # gradients computed before the last micro-batch's backward
        end = ready + tensors
        for index, bucket in enumerate(buckets):
            phase, *call, issue, in_flight = next(calls)
            elements, ready = sum(bucket), ready + len(bucket)
            sent = 2 * (4 * elements * (world - 1) // world)
            assert call == ["all_reduce", "dp_cp", elements, "float32", sent], f"bucket {index}: {call}"
            if config.dp_mode == "naive":
                assert (phase, issue) == ("optimizer", end), f"bucket {index} does not wait for the backward's end"
                assert in_flight == 1, f"bucket {index} does not wait for the one before"
            else:  # the backward meets the parameters of one layer in an order of its own; a layer has nine
                assert phase == "backward", f"bucket {index} is launched in the phase {phase}"
                assert in_flight > 1 or index == 0, f"bucket {index} waits for the one before"
                assert ready <= issue <= min(end, ready + 8), f"bucket {index}: after {issue} gradients, not {ready}"
        for group in ("world", "dp_cp"):  # the norm, then the loss
            assert next(calls)[:5] == ("optimizer", "all_reduce", group, 1, "float64"), f"{group} in step {step}"
    assert next(calls, None) is None, "more collectives than expected"


TIED = "tie-embeddings", "no-tie-embeddings"
CASES = [
    f"--{tied} --dp-mode {mode} {times}"  # several micro-batches in a step, or several steps
    for tied, mode, times in itertools.product(TIED, ("naive", "overlap", "bucket"), ("", "--micro-batch 3 --steps 2"))
]


@pytest.mark.parametrize("world", [2, 3] if os.environ.get("TEST_ALL") else [3])
def test_what_train_issues_and_when(world):
    for rank, found in enumerate(run_ranks(world, observe_each, watch_train, CASES)):
        for case, calls in zip(CASES, found, strict=True):
            try:
                check_train(calls, case, world)
            except AssertionError as error:
                raise AssertionError(f"rank {rank} of {world}, {case}: {error}") from error


# ---- buckets ---------------------------------------------------------------------------------------------------------


def test_a_bucket_is_filled_to_the_last_byte():
    """1.001 * 1e6 is below 1,001,000 in floating point."""
    parameters = [nn.Parameter(torch.empty(125_125, device="meta")) for _ in range(4)]  # 500,500 bytes each
    assert [len(some) for some in fill_with_parameters(parameters, "bucket", 1.001)] == [2, 2]


def build_alone(flags: str) -> tuple[list[nn.Parameter], DataParallel]:
    config = configuration(flags, 1)
    model, gradients, _ = build(config, mesh_of(config))
    return list(model.parameters()), gradients


def check_launches(parameters: list[nn.Parameter], gradients, launched) -> None:
    """One gradient may complete many buckets, if the backward computes them in another order: all are launched then."""
    for parameter in parameters:
        assert launched() == 0, "launches: some before the first bucket is complete"
        gradients.accumulate(parameter, torch.ones_like(parameter))
    assert launched() > 1, "launches: complete buckets wait"


def launch_in_data_parallel(mode: str) -> None:
    parameters, gradients = build_alone(f"--dp-mode {mode} --bucket-mb 0.001")
    check_launches(parameters, gradients, lambda: sum(bucket.work is not None for bucket in gradients.buckets))


def test_complete_buckets_do_not_wait():  # of one gradient each; of others, the tests of the mutants ask for it
    launch_in_data_parallel("overlap")


def test_a_late_gradient_is_an_error():
    (*_, last), gradients = build_alone("--dp-mode overlap")
    gradients.accumulate(last, torch.ones_like(last))
    with pytest.raises(RuntimeError, match=f"{last.spec.name}: a gradient came after its bucket was launched"):
        gradients.accumulate(last, torch.ones_like(last))
