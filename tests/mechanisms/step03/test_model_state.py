"""What is held how long, and parameters that not every rank uses: what sharding must not change.

Of some checks only the tests of the mutants ask, before they break what is checked.
"""

import itertools
from unittest import mock

import pytest
import torch

from common.counts import count_parameters
from common.measure.storages import live_bytes
from common.model import Decoder, SwiGLU, cross_entropy_sum
from common.process_groups import Degrees, build_mesh
from common.start import environment
from step01_single_gpu.running.memory_meter import Allocation, MemoryMeter
from step03_zero.apply_zero import apply_zero
from step03_zero.train import build
from step03_zero.unit import ALIGNMENT
from step03_zero.zero import Zero
from tests.harness.observing import observe_each
from tests.harness.ranks import run_ranks
from tests.mechanisms.step02.test_accounting import check_launches
from tests.mechanisms.step03.checks import check_calls, check_same_order
from tests.mechanisms.step03.observe import BASE, Observation, observe, prepare
from tests.mechanisms.step03.test_accounting import SMALL, plan_of
from tests.parity.runs import Result, assemble, assert_parity, reference, train_case, training_of

DEEP = "--layers 24 --hidden 64 --ffn 96 --vocab 256"  # many layers: one is little of the whole
SEED = "--seed 3 --dtype float64"  # as in the tests of parity

# ---- shards and buckets ----------------------------------------------------------------------------------------------

ODD = "--zero 3 --hidden 20 --heads 2 --kv-heads 1 --ffn 27 --optimizer sgd"  # no multiple of 3 x 64 elements


def ranks_aligned(flags: str) -> tuple[list[int], dict]:
    """Where this rank's shards begin when they are aligned as on CUDA, and what training with them gives."""
    with mock.patch.dict(ALIGNMENT, cpu=64):
        _, zero, _ = build(*prepare(flags))
        return [unit.mine.start for unit in zero.units], train_case(3, flags)


def test_shards_begin_at_aligned_elements():
    ranks = run_ranks(3, ranks_aligned, ODD)
    assert {start % 64 for starts, _ in ranks for start in starts} == {0}
    assert_parity(assemble([case for _, case in ranks]), reference(training_of(ODD)), ODD)


def initial_peak() -> tuple[int, int, int, int]:
    """Bytes at the peak while `Zero` makes stage 3 of a deep model; of its shards, its largest unit, and all of it."""
    config, mesh = prepare(f"{DEEP} --zero 3 --micro-batch 1")
    model = Decoder(config.model_config)
    with MemoryMeter("cpu").measure() as found:
        zero = apply_zero(model, config, mesh, Zero)
    shards, weights = zip(*((unit.shard.nbytes, unit.weights.nbytes) for unit in zero.units))
    return found.peak_bytes, sum(shards), max(weights), 4 * count_parameters(config.model_config).total


def check_initial_peak(peak: int, shards: int, unit: int, whole: int) -> None:
    """On four ranks: one unit at a time and what drawing a piece takes beside the shards, far from the whole model."""
    assert shards == pytest.approx(whole / 4, rel=0.001)
    assert peak <= shards + unit + 300_000, f"initial peak: {peak} bytes for shards of {shards}"
    assert peak < whole / 2, f"initial peak: {peak} of the whole model's {whole} bytes"


# ---- memory of one micro-batch ---------------------------------------------------------------------------------------


def peak_of_gradients(flags: str) -> tuple[int, int, int]:
    """Bytes at the peak of one micro-batch's backward beyond what was alive at its begin; of the largest unit's
    gradients and of all."""
    config, mesh = prepare(f"{DEEP} --seq-len 4 --bucket-mb 0.1 --micro-batch 1 {flags}")
    model, zero, _ = build(config, mesh)
    tokens = torch.zeros(1, config.seq_len, dtype=torch.int64)
    for _ in range(2):  # in the first step ranks make connections
        zero.gather()
        loss = cross_entropy_sum(model(tokens), tokens)
        with MemoryMeter("cpu").measure() as found, zero.backward(last=True):
            loss.backward()
        zero.finish()
    largest = max(4 * unit.weights.numel() for unit in zero.units)
    return found.peak_bytes, largest, 4 * count_parameters(config.model_config).total


def check_peak_of_gradients(peak: int, unit: int, whole: int) -> None:
    """This rank's half of the sum, and the bucket in flight, what it receives, and one or two that fill."""
    assert whole > 15 * unit
    assert peak < whole / 2 + 5 * unit, f"peak of gradients: {peak} bytes, half of {whole} and {unit} for each bucket"


def test_reduced_buckets_are_freed():
    """In stage 3; in stage 2, the tests of the mutants ask for it."""
    for found in run_ranks(2, peak_of_gradients, "--zero 3"):
        check_peak_of_gradients(*found)


def live_buffers(flags: str) -> tuple[int, int, int]:
    """On this rank, the most tensors at once that have the size of a whole unit, of what one receives from the other
    ranks of its group, and how many units there are: in one step, as the allocator saw it."""
    config, mesh = prepare(f"{DEEP} --layers 6 --seq-len 4 --bucket-mb 0.1 --global-batch 4 --micro-batch 1 {flags}")
    model, zero, _ = build(config, mesh)
    tokens = torch.zeros(1, config.seq_len, dtype=torch.int64)
    for _ in range(2):  # in the first step ranks make connections
        with MemoryMeter("cpu").measure() as found:
            zero.gather()
            loss = cross_entropy_sum(model(tokens), tokens)
            with zero.backward(last=True):
                loss.backward()
            zero.finish()
    whole = {4 * unit.weights.numel() for unit in zero.units}
    others = {size - size // mesh.shard.size for size in whole}
    assert not whole & others, "sizes of units: no telling what is what"
    return *(most_at_once(found.allocations, sizes) for sizes in (whole, others)), len(zero.units)


def most_at_once(allocations: list[Allocation], sizes: set[int]) -> int:
    changes = ((each.bytes > 0) - (each.bytes < 0) for each in allocations if abs(each.bytes) in sizes)
    return max(itertools.accumulate(changes, initial=0))


def test_buffers_are_few():
    """Every gradient has its place in a bucket once. gloo receives the other ranks' parts of two buckets at most, and
    gathers and sums in place. That the next step gathers everything at its start takes no buffer either."""
    received = {f"--zero 0 --dp-mode {mode}": 0 for mode in ("naive", "overlap", "bucket")}
    received |= {"--zero 1": 2, "--zero 2": 1, "--zero 2 --zero-reduce step": 1, "--zero 3": 1}
    received |= {"--zero 1 --zero-replicas 2": 1, "--zero 1 --zero-replicas 4": 0}  # each is summed over the replicas
    ranks = run_ranks(4, observe_each, live_buffers, list(received))
    for (case, most), found in zip(received.items(), zip(*ranks, strict=True), strict=True):
        for buckets, receives, units in found:
            assert receives == most, f"{case}: {receives} buffers for what comes from others"
            assert units > 6, case
            if case < "--zero 2":  # one parameter is as large as its gradient in autograd
                assert units <= buckets <= units + (case[-5:] in ("naive", "erlap")), f"{case}: {buckets} of {units}"
            elif case < "--zero 3":
                assert buckets <= 3, f"{case}: {buckets} buckets"


def test_memory_is_given_back_whoever_still_refers_to_it():
    """gloo's thread refers to a reduced bucket for a moment, and a forward without a backward frees the last layer."""
    config, mesh = prepare(f"--zero 3 --micro-batch 1 {SMALL}")
    model, zero, _ = build(config, mesh)
    with torch.no_grad():
        zero.gather()
        model(torch.zeros(1, config.seq_len, dtype=torch.int64))
    unit = zero.units[0]
    unit.reduce_scatter()
    bucket = unit.bucket.flat
    unit.complete()
    left = live_bytes([bucket, *(each.weights for each in zero.units)])
    assert left == 0, f"{left} bytes are kept"


@pytest.mark.gpu
def test_a_layer_that_was_gathered_is_given_back():
    """It gathers weights into storage that it takes and gives back: is the memory really free?"""
    config, _ = prepare("--zero 3 --layers 2 --hidden 2048 --heads 4 --ffn 8192 --vocab 256")
    _, zero, _ = build(config, build_mesh(Degrees(), torch.device("cuda")))
    unit, before = max(zero.units, key=lambda each: each.weights.numel()), torch.cuda.memory_allocated()
    for _ in range(2):
        unit.fetch().wait()
        assert unit.weights.nbytes <= torch.cuda.memory_allocated() - before < unit.weights.nbytes + 2**21
        assert torch.equal(unit.weights[unit.mine], unit.shard)
        unit.free()
        assert torch.cuda.memory_allocated() == before


def launch_in_zero() -> None:
    config, mesh = prepare(f"--zero 1 --micro-batch 1 {SMALL}")
    model, zero, _ = build(config, mesh)
    launched = lambda: sum(unit.scattering is not None or unit.summing is not None for unit in zero.units)  # noqa: E731
    check_launches(list(model.parameters()), zero, launched)


# ---- parameters that not every rank uses -----------------------------------------------------------------------------


def without_gate(self, x):
    return self.down_proj(self.up_proj(x))


def ranks_unused(cases: list[str]) -> list[Observation]:
    """What this rank does. The last rank never uses the gates."""
    last = environment().rank == environment().world_size - 1
    with mock.patch.object(SwiGLU, "forward", without_gate if last else SwiGLU.forward):
        return [observe(flags) for flags in cases]


def one_process_unused(size: int, world: int) -> Result:
    """The same in step 1: every `world`-th micro-batch of `size` samples is the last rank's."""
    forwards, forward = itertools.count(), SwiGLU.forward

    def of_rank(self, x):
        micro_batch = next(forwards) // 3  # layers
        return (forward if (micro_batch + 1) % world else without_gate)(self, x)

    with mock.patch.object(SwiGLU, "forward", of_rank):
        return assemble([train_case(1, training_of(f"{BASE} {SEED}", size))])


def test_a_parameter_unused_on_one_rank_changes_no_order():
    """And no sum: stage 0 is step 2, in all its modes."""
    sizes = "--micro-batch 1", "--micro-batch 4"
    cases = [f"{flags} {size}" for size in sizes for flags in (f"--zero {stage} {SMALL}" for stage in range(4))]
    cases += [f"--zero 3 --recompute full {size}" for size in sizes]
    cases += [f"--zero {stage} --zero-reduce step {SMALL} --micro-batch 1" for stage in (2, 3)]
    cases += [f"--zero 0 --dp-mode {mode} {sizes[0]}" for mode in ("naive", "overlap")]
    ranks = run_ranks(3, ranks_unused, [f"{case} {SEED}" for case in cases])
    expected = {size: one_process_unused(int(size[-1]), 3) for size in sizes}
    for case, parts in zip(cases, zip(*ranks, strict=True), strict=True):
        check_same_order(parts)
        if "--dp-mode" not in case:
            check_calls(parts[-1], plan_of(f"{case} {SEED}", 3))
        assert_parity(assemble([each.result for each in parts]), expected[case[-len(sizes[0]) :]], case)
