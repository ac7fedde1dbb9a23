"""Initial weights, activations, and parameters that not every rank uses: what sharding must not change."""

import tempfile
from unittest import mock

import pytest
import torch

from common.config import TrainConfig
from common.counts import count_parameters
from common.measure.storages import live_bytes
from common.model import Decoder, SwiGLU, cross_entropy_sum
from common.start import environment
from common.weights.initialisation import materialise, random_values
from step01_single_gpu.cost import saved_activations, total_bytes
from step01_single_gpu.memory_meter import MemoryMeter
from step03_zero import train as step03
from step03_zero.train import build
from step03_zero.unit import ALIGNMENT
from step03_zero.zero import Zero, fill_all_buckets
from tests.harness.ranks import run_ranks
from tests.mechanisms.step02.test_accounting import check_launches
from tests.mechanisms.step03.checks import check_calls, check_same_order
from tests.mechanisms.step03.observe import Observation, observe, prepare
from tests.mechanisms.step03.test_accounting import SMALL, plan_of
from tests.parity.runs import assemble, assert_parity, boxes_of, curve_of, reference, train_case, training_of

DEEP = "--layers 24 --hidden 64 --ffn 96 --vocab 256"  # many layers: one is little of the whole


# ---- initial weights -------------------------------------------------------------------------------------------------


def ranks_initial_weights(cases: list[str]) -> list[bool]:
    """Whether this rank's shards are those of step 1's weights, bit for bit, and what is gathered from them too."""
    equal = []
    for flags in cases:
        config, mesh = prepare(flags)
        alone = Decoder(config.model_config)
        materialise(alone, config.torch_dtype, mesh.device, random_values(config.seed))
        whole = {parameter.spec.name: parameter.detach() for parameter in alone.parameters()}
        model, zero, _ = build(config, mesh)
        pieces = [whole[shard.spec.name].flatten()[slice(*shard.spec.flat_range)] for shard in zero.shards]
        zero.gather()
        for unit in zero.units:
            unit.fetch().wait()
        gathered = [(whole[parameter.spec.name], parameter) for parameter in model.parameters()]
        pairs = [*zip(zero.shards, pieces, strict=True), *gathered]
        equal.append(len(pieces) > 0 and all(torch.equal(one, other) for one, other in pairs))
    return equal


def test_initial_weights_are_those_of_one_process():
    kinds = "--tie-embeddings --dtype bfloat16", "--no-tie-embeddings --dtype float32"
    cases = [f"--zero {stage} {SMALL} {kind} --micro-batch 1" for stage in range(4) for kind in kinds]
    assert run_ranks(3, ranks_initial_weights, cases) == [[True] * len(cases)] * 3


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
        zero = Zero(model, config, mesh)
    shards, weights = zip(*((unit.shard.nbytes, unit.weights.nbytes) for unit in zero.units))
    return found.peak_bytes, sum(shards), max(weights), 4 * count_parameters(config.model_config).total


def check_initial_peak(peak: int, shards: int, unit: int, whole: int) -> None:
    """One unit at a time and what drawing a piece takes beside the shards, far from the whole model."""
    assert peak <= shards + unit + 300_000, f"initial peak: {peak} bytes for shards of {shards}"
    assert peak < whole / 2, f"initial peak: {peak} of the whole model's {whole} bytes"


def test_no_rank_ever_holds_the_whole_model():
    for found in run_ranks(4, initial_peak):
        assert found[1] == pytest.approx(found[-1] / 4, rel=0.001)
        check_initial_peak(*found)


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


@pytest.mark.parametrize("stage", [2, 3])
def test_reduced_buckets_are_freed(stage):
    for found in run_ranks(2, peak_of_gradients, f"--zero {stage}"):
        check_peak_of_gradients(*found)


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


def launch_in_zero() -> None:
    config, mesh = prepare(f"--zero 1 --micro-batch 1 {SMALL}")
    model, zero, _ = build(config, mesh)
    launched = lambda: sum(unit.scattering is not None or unit.summing is not None for unit in zero.units)  # noqa: E731
    check_launches(list(model.parameters()), zero, launched)


def test_complete_units_do_not_wait():
    launch_in_zero()


def ranks_saved_activations(cases: list[str]) -> list[int]:
    """Bytes that autograd keeps for the backward of one micro-batch: storages other than the parameters'."""
    result = []
    for flags in cases:
        config, mesh = prepare(flags)
        (model, zero, _), kept = build(config, mesh), []

        def keep(tensor, kept=kept):
            kept.append(tensor.detach())
            return tensor

        zero.gather()
        tokens = torch.randint(config.model_config.vocab, (2, config.seq_len))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = cross_entropy_sum(model(tokens), tokens.clone()) / tokens.numel()
        parameters = list(model.parameters())  # in stage 3 most of them are without memory again
        result.append(live_bytes(kept + parameters) - live_bytes(parameters))
        with zero.backward(last=True):
            loss.backward()
        zero.finish()
    return result


def test_activations_are_the_same_in_every_stage():
    modes = ("none", "selective", "full")
    cases = [f"--zero {stage} --recompute {mode} {SMALL} --micro-batch 2" for stage in range(4) for mode in modes]
    model = plan_of(cases[0], 2).config.model_config
    predicted = [total_bytes(saved_activations(model, 2, 16, torch.float32, "fused", mode)) for mode in modes]
    assert run_ranks(2, ranks_saved_activations, cases) == [predicted * 4] * 2


# ---- parameters that not every rank uses -----------------------------------------------------------------------------


def ranks_unused(cases: list[str]) -> list[tuple[Observation, dict]]:
    """What this rank does, and its part of the result. The last rank never uses the gates."""
    result, trained, train = [], [], step03.train

    def without_gate(self, x):
        return self.down_proj(self.up_proj(x))

    last = environment().rank == environment().world_size - 1
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(SwiGLU, "forward", without_gate if last else SwiGLU.forward),
        mock.patch.object(step03, "train", lambda *arguments: trained.append(train(*arguments))),
    ):
        for index, flags in enumerate(cases):
            seen = observe(f"{flags} --run-dir {folder}/{index}")
            curve = curve_of(f"{folder}/{index}") if environment().rank == 0 else []
            result.append((seen, {"curve": curve, "boxes": boxes_of(trained.pop())}))
    return result


def test_a_parameter_unused_on_one_rank_changes_no_order():
    cases = [f"--zero {stage} {SMALL} --micro-batch {size}" for stage in range(4) for size in (1, 4)]
    cases += [f"--zero 3 --recompute full --micro-batch {size}" for size in (1, 4)]
    cases += [f"--zero {stage} --zero-reduce step {SMALL} --micro-batch 1" for stage in (2, 3)]
    ranks, results = run_ranks(3, ranks_unused, [f"{case} --dtype float64" for case in cases]), {}
    for case, parts in zip(cases, zip(*ranks, strict=True), strict=True):
        check_same_order([seen for seen, _ in parts])
        check_calls(parts[-1][0], plan_of(f"{case} --dtype float64", 3))
        results[case] = assemble([part for _, part in parts])
    for case in cases:  # with step 2's sums, which its own tests compare with one process
        size = 4 if case.endswith("4") else 1  # which decides who has which samples
        assert_parity(results[case], results[f"--zero 0 {SMALL} --micro-batch {size}"], case)


def test_buckets_of_parameters_with_different_sums():
    """Each kind has buckets of its own, in the order in which the backward begins them."""
    parameters = list(Decoder(TrainConfig().model_config).parameters())
    parameters[3].spec.own_bucket = True
    parameters[5].spec.shard_groups = parameters[7].spec.shard_groups = ("expert_shard", "expert_replica")
    dense = [each for index, each in enumerate(parameters) if index not in (3, 5, 7)]
    expected = [dense[::-1], [parameters[7], parameters[5]], [parameters[3]]]
    found = fill_all_buckets(parameters, "bucket", 25.0)
    assert [[id(each) for each in bucket] for bucket in found] == [[id(each) for each in bucket] for bucket in expected]
