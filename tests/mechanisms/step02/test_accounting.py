"""What data parallelism issues, when, in which order, how many bytes: no loss curve shows any of this."""

import itertools
import os
from unittest import mock

import pytest
import torch
from torch import nn

from common import collectives
from common.config import TrainConfig
from common.costs.vocabulary import Message, added
from common.model import Decoder
from common.parameter import ParameterSpec
from common.process_groups import Degrees, build_mesh
from common.start import environment
from step02_data_parallel import cost
from step02_data_parallel.data_parallel import DataParallel
from step02_data_parallel.train import build, train
from tests.harness.observing import configure, mesh_of, observe_each
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
    computed, accumulate, config = [0], DataParallel.accumulate, configuration(flags, environment().world_size)
    in_flight = []

    def counting(self, parameter, gradient):
        computed[0] += 1
        accumulate(self, parameter, gradient)

    with mock.patch.object(DataParallel, "accumulate", counting):
        with collectives.record(
            clock=lambda: computed[0],
            launched=lambda *_: in_flight.append(sum(call.wait_end is None for call in calls)),
        ) as calls:
            train(config, mesh_of(config))
    return [
        (call.phase, call.op, call.group, call.elements, call.dtype, call.bytes, call.issue, together)
        for call, together in zip(calls, in_flight, strict=True)
        if call.phase != "setup"
    ]


def buckets_by_formula(flags: str) -> list[list[int]]:
    """Elements of the tensors in each bucket: reverse order, at most `limit` unless one tensor alone is larger."""
    config, buckets = configuration(flags, 1), []
    limit = BUCKET_MB * 1e6 / 4 if config.dp_mode == "bucket" else 0
    for parameter in reversed(list(Decoder(config.model_config).parameters())):
        if buckets and sum(buckets[-1]) + parameter.numel() <= limit:
            buckets[-1].append(parameter.numel())
        else:
            buckets.append([parameter.numel()])
    return buckets


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
                assert ready <= issue <= min(end, ready + 8), f"bucket {index}: after {issue} gradients, not {ready}"
        for group in ("world", "dp_cp"):  # the norm, then the loss
            assert next(calls)[:5] == ("optimizer", "all_reduce", group, 1, "float64"), f"{group} in step {step}"
    assert next(calls, None) is None, "more collectives than expected"


def check_cost(calls: list[tuple], flags: str, world: int) -> None:
    """Raise AssertionError unless a rank sends what cost.py says, but for bytes that N does not divide."""
    steps = configuration(flags, world).steps
    found = added(Message(group, op, sent, 1 / steps) for _, op, group, _, _, sent, _, _ in calls)
    buckets = buckets_by_formula(flags)
    predicted = added(cost.messages(sum(map(sum, buckets)), world, buckets=len(buckets)))
    assert found.keys() == predicted.keys()
    for key, numbers in predicted.items():
        assert found[key] == pytest.approx(numbers, rel=0.2 if key[0] == "world" else 1e-3), key


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
                check_cost(calls, case, world)
            except AssertionError as error:
                raise AssertionError(f"rank {rank} of {world}, {case}: {error}") from error


# ---- buckets ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("mode", ["overlap", "bucket"])
def test_complete_buckets_do_not_wait(mode):
    launch_in_data_parallel(mode)


def test_a_late_gradient_is_an_error():
    (*_, last), gradients = build_alone("--dp-mode overlap")
    gradients.accumulate(last, torch.ones_like(last))
    with pytest.raises(RuntimeError, match=f"{last.spec.name}: a gradient came after its bucket was launched"):
        gradients.accumulate(last, torch.ones_like(last))


# ---- parameters that not every rank uses -----------------------------------------------------------------------------


class Choosy(nn.Module):
    """Three matrices, of which the middle one takes part only when told so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrices = nn.ParameterList([nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(3)])
        for index, parameter in enumerate(self.matrices):
            parameter.spec = ParameterSpec(str(index), (4, 4), ((0, 4), (0, 4)), 0.02)

    def forward(self, x, whole: bool):
        first, middle, last = self.matrices
        return ((x @ first @ middle if whole else x @ first) @ last).square().sum()


def ranks_unused() -> dict[str, list]:
    """Rank 1 never uses the middle matrix, in the second step nobody does. The calls of each mode, step by step."""
    mesh, orders = build_mesh(Degrees(dp=3), torch.device("cpu")), {}
    inputs = [torch.full((2, 4), rank + 1.0, dtype=torch.float64) for rank in range(3)]
    for mode in ("naive", "overlap", "bucket"):
        model, orders[mode] = Choosy(), []
        gradients = DataParallel(list(model.parameters()), mesh.dp_cp, mode, 100e-6)  # 100 bytes: a bucket a matrix
        for used in ([True, False, True], [False, False, False], [True, True, True]):
            with collectives.record() as calls:
                for index in range(2):
                    with gradients.backward(last=index > 0):
                        model(inputs[mesh.rank], used[mesh.rank]).backward()
                total = gradients.finish()
            orders[mode].append([(call.op, call.elements) for call in calls])
            single = Choosy()
            for each, whole in 2 * list(zip(inputs, used)):
                single(each, whole).backward()
            for mine, other in zip(total, single.parameters(), strict=True):
                expected = torch.zeros_like(mine) if other.grad is None else other.grad
                torch.testing.assert_close(mine, expected, rtol=1e-14, atol=1e-14)
    return orders


def test_a_parameter_unused_on_one_rank_changes_no_order():
    for orders in run_ranks(3, ranks_unused):
        assert orders == dict.fromkeys(("naive", "overlap", "bucket"), [[("all_reduce", 16)] * 3] * 3)
