"""What data parallelism issues, when, in which order, how many bytes: no loss curve shows any of this."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common import collectives
from common.initialisation import materialise, random_values
from common.measure import tcp_bytes as wire
from common.model import Decoder, cross_entropy_sum
from common.model_config import ModelConfig
from common.parameter import ParameterSpec
from common.process_groups import Degrees, Mesh, build_mesh
from common.tracing.tracer import Tracer
from step02_data_parallel.data_parallel import DataParallel
from tests.harness.ranks import run_ranks

UNTIED = ModelConfig(vocab=64, hidden=32, layers=3, heads=4, kv_heads=2, ffn=48, tie_embeddings=False)
TIED = ModelConfig(vocab=64, hidden=32, layers=3, heads=4, kv_heads=2, ffn=48, tie_embeddings=True)
LARGE = ModelConfig(vocab=1024, hidden=256, layers=2, heads=4, kv_heads=4, ffn=768, tie_embeddings=True)
BUCKET_MB = 0.02


class Recorder:
    """Keeps the calls and the time of their issue, and nothing else."""

    clock = staticmethod(time.perf_counter_ns)

    def __init__(self):
        self.calls = []

    def watch(self, handle, calls, done_at):
        pass


def dp_mesh() -> Mesh:
    return build_mesh(Degrees(dp=int(os.environ["WORLD_SIZE"])), torch.device("cpu"))


def decoder(config: ModelConfig, dtype=torch.float32) -> list[nn.Parameter]:
    model = Decoder(config)
    materialise(model, dtype, torch.device("cpu"), random_values(0))
    return model


def step(model, gradients: DataParallel, mesh: Mesh, accumulation: int = 1, seed: int = 0) -> dict:
    """One step of the training loop without the update. What was issued, when, and the summed gradients."""
    tracer = Tracer(None, mesh, None)
    generator = torch.Generator().manual_seed(100 * seed + mesh.rank)
    issued_by_micro_batch = []
    collectives.recorder = recorder = Recorder()
    collectives.reset_bytes()
    for index in range(accumulation):
        tokens = torch.randint(model.config.vocab, (1, 17), generator=generator)
        with tracer.phase("forward"):
            share = cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:]) / (16 * accumulation * mesh.dp.size)
        with tracer.phase("backward"), gradients.no_sync(index < accumulation - 1):
            share.backward()
        backward_end = time.perf_counter_ns()
        issued_by_micro_batch.append(len(recorder.calls))
    with tracer.phase("optimizer"):
        total = gradients.finish()
    collectives.recorder = None
    return {
        "calls": [(call.op, call.group, call.elements, call.dtype, call.bytes) for call in recorder.calls],
        "phases": [call.phase for call in recorder.calls],
        "before_end": sum(call.issue < backward_end for call in recorder.calls),
        "by_micro_batch": issued_by_micro_batch,
        "sent": collectives.sent_bytes["dp_cp"],
        "gradients": total,
    }


def buckets_by_formula(sizes: list[int], limit: float) -> list[int]:
    """Elements of each bucket: reverse order, at most `limit` elements unless one tensor alone is larger."""
    result = []
    for size in reversed(sizes):
        if result and result[-1] + size <= limit:
            result[-1] += size
        else:
            result.append(size)
    return result


# ---- how many, how large, when, in which order -----------------------------------------------------------------------


def ranks_steps():
    """Two steps in every mode, with and without accumulation, tied and untied."""
    mesh, result = dp_mesh(), {}
    for config in (UNTIED, TIED):
        for mode in ("naive", "overlap", "bucket"):
            for accumulation in (1, 3):
                model = decoder(config)
                parameters = list(model.parameters())
                gradients = DataParallel(parameters, mesh.dp_cp, mode, BUCKET_MB)
                step(model, gradients, mesh, accumulation)
                made = step(model, gradients, mesh, accumulation, seed=1)  # the second: everything was reset
                del made["gradients"]
                made["sizes"] = [parameter.numel() for parameter in parameters]
                result[config.tie_embeddings, mode, accumulation] = made
    return result


@pytest.fixture(scope="module", params=[2, 3])
def steps(request):
    return request.param, run_ranks(request.param, ranks_steps)


def test_number_and_size_of_all_reduces(steps):
    _, ranks = steps
    for (tied, mode, accumulation), made in ranks[0].items():
        case = f"tied {tied}, {mode}, accumulation {accumulation}"
        sizes = made["sizes"]
        assert len(sizes) == 3 * 9 + (2 if tied else 3), "a tied matrix is one parameter"
        limit = BUCKET_MB * 1e6 / 4 if mode == "bucket" else 0
        expected = buckets_by_formula(sizes, limit)
        assert len(expected) == (len(sizes) if mode != "bucket" else 6 if tied else 7), case
        assert [call[2] for call in made["calls"]] == expected, (
            f"{case}: one a bucket and step, whatever the accumulation"
        )
        assert {call[:2] + call[3:4] for call in made["calls"]} == {("all_reduce", "dp_cp", "float32")}, case


def test_every_rank_issues_the_same_in_the_same_order(steps):
    _, ranks = steps
    for key, made in ranks[0].items():
        for rank in ranks[1:]:
            assert rank[key]["calls"] == made["calls"], key


def test_bytes_are_those_of_the_formula(steps):
    world, ranks = steps
    for key, made in ranks[0].items():
        expected = 2 * (world - 1) / world * 4 * sum(made["sizes"])
        assert made["sent"] == sum(call[4] for call in made["calls"]), key
        assert made["sent"] == pytest.approx(expected, abs=2 * len(made["calls"])), f"{key}: each rounds down"


def test_accumulation_sends_nothing_before_the_last_micro_batch(steps):
    _, ranks = steps
    for (tied, mode, accumulation), made in ranks[0].items():
        assert made["by_micro_batch"][:-1] == [0] * (accumulation - 1), (tied, mode)
        assert made["sent"] == ranks[0][tied, mode, 1]["sent"], "a step costs the same, a micro-batch 1/accumulation"


def test_when_they_are_issued(steps):
    _, ranks = steps
    for rank in ranks:
        for (tied, mode, accumulation), made in rank.items():
            case, count = (tied, mode, accumulation), len(made["phases"])
            if mode == "naive":
                assert made["phases"] == ["optimizer"] * count and made["before_end"] == 0, case
            else:  # every parameter is used, so even the last bucket is complete within the backward
                assert made["phases"] == ["backward"] * count and made["before_end"] == count, case


class Progress(Recorder):
    """Notes at each issue how many parameters have got their gradient so far."""

    def __init__(self, gradients: DataParallel):
        super().__init__()
        self.clock = lambda: len(gradients.filled)


def ranks_progress():
    mesh, result = dp_mesh(), {}
    for mode in ("naive", "overlap", "bucket"):
        model = decoder(UNTIED)
        parameters = list(model.parameters())
        gradients = DataParallel(parameters, mesh.dp_cp, mode, BUCKET_MB)
        collectives.recorder = recorder = Progress(gradients)
        tokens = torch.zeros(1, 16, dtype=torch.int64)
        cross_entropy_sum(model(tokens), tokens).backward()
        gradients.finish()
        collectives.recorder = None
        inside = [len(bucket.views) for bucket in gradients.buckets]
        result[mode] = [call.issue for call in recorder.calls], inside, len(parameters)
    return result


def test_each_bucket_starts_as_soon_as_its_gradients_are_there():
    """Not all at the end of the backward: issued "in the backward" as well, they would overlap with nothing."""
    for rank in run_ranks(2, ranks_progress):
        for mode, (ready, inside, count) in rank.items():
            if mode == "naive":
                assert ready == [count] * count
                continue
            for index, so_far in enumerate(ready):
                needed = sum(inside[: index + 1])
                # the backward meets the parameters of one layer in an order of its own; a layer has nine
                assert needed <= so_far <= needed + 8, f"{mode}, bucket {index}: {so_far} of {count} gradients"
            assert ready[0] <= 9 < count


# ---- bytes on the wire -----------------------------------------------------------------------------------------------


def ranks_wire():
    """Bytes of three steps: the log's, those of this rank's sockets, those of the loopback interface."""
    mesh = dp_mesh()
    model = decoder(LARGE)
    gradients = DataParallel(list(model.parameters()), mesh.dp_cp, "bucket", 2.0)
    step(model, gradients, mesh)
    rows = []
    for _ in range(3):
        dist.barrier()
        before = wire.sent_by_me(), wire.loopback()
        dist.barrier()
        made = step(model, gradients, mesh)
        dist.barrier()
        after = wire.sent_by_me(), wire.loopback()
        dist.barrier()  # a rank that ends closes sockets that others still read
        rows.append([made["sent"], *(None if a is None else a - b for a, b in zip(after, before))])
    return rows, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_on_the_wire(world):
    ranks = run_ranks(world, ranks_wire)
    model = 2 * (world - 1) / world * 4 * ranks[0][1]  # 2(N-1)/N K
    for rows, _ in ranks:
        for logged, by_sockets, _ in rows:
            assert logged == pytest.approx(model, rel=1e-5)
            if by_sockets is not None:
                assert by_sockets == pytest.approx(model, rel=0.01), "each rank's own sockets, payload only"
    crossed = [row[2] for row in ranks[0][0]]
    if None not in crossed:  # all processes' traffic is in it: more than ours, and in a quiet moment little more
        assert min(crossed) >= 0.999 * world * model
        assert min(crossed) < 1.05 * world * model


# ---- sums ------------------------------------------------------------------------------------------------------------


def ranks_sums():
    """The sums of the ranks' shares against one process that takes all their samples as one batch."""
    mesh, result = dp_mesh(), {}
    for mode in ("naive", "overlap", "bucket"):
        model = decoder(TIED, torch.float64)
        parameters = list(model.parameters())
        gradients = DataParallel(parameters, mesh.dp_cp, mode, BUCKET_MB)
        for seed in (3, 4):  # the second step must not see the first one
            total = step(model, gradients, mesh, 2, seed)["gradients"]
        alone = decoder(TIED, torch.float64)
        batches = []
        for rank in range(mesh.dp.size):
            generator = torch.Generator().manual_seed(400 + rank)
            batches += [torch.randint(TIED.vocab, (1, 17), generator=generator) for _ in range(2)]
        tokens = torch.cat(batches)
        (cross_entropy_sum(alone(tokens[:, :-1]), tokens[:, 1:]) / tokens[:, 1:].numel()).backward()
        differences = [
            ((mine - other.grad).norm() / other.grad.norm()).item()
            for mine, other in zip(total, alone.parameters(), strict=True)
        ]
        result[mode] = max(differences)
    return result


def test_sums_equal_the_whole_batch_in_one_process():
    for rank in run_ranks(3, ranks_sums):
        assert max(rank.values()) < 1e-13, rank


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
        x = x @ self.matrices[0]
        if whole:
            x = x @ self.matrices[1]
        return (x @ self.matrices[2]).square().sum()


def ranks_unused():
    """Rank 1 never uses the middle matrix, in the second step nobody does."""
    mesh, result = dp_mesh(), {}
    for mode in ("naive", "overlap", "bucket"):
        model = Choosy()
        parameters = list(model.parameters())
        gradients = DataParallel(parameters, mesh.dp_cp, mode, 100e-6)  # 100 bytes: a bucket a matrix
        orders, differences = [], []
        for used in ([True, False, True], [False, False, False], [True, True, True]):
            inputs = [torch.full((2, 4), rank + 1.0, dtype=torch.float64) for rank in range(3)]
            collectives.recorder = recorder = Recorder()
            for index in range(2):
                with gradients.no_sync(index == 0):
                    model(inputs[mesh.rank], used[mesh.rank]).backward()
            total = [gradient.clone() for gradient in gradients.finish()]
            collectives.recorder = None
            orders.append([(call.op, call.elements) for call in recorder.calls])
            alone = Choosy()
            for each, whole in zip(inputs, used):
                for _ in range(2):
                    alone(each, whole).backward()
            for mine, other in zip(total, alone.parameters(), strict=True):
                expected = torch.zeros_like(mine) if other.grad is None else other.grad
                differences.append((mine - expected).norm().item() / (1 + expected.norm().item()))
        result[mode] = orders, max(differences)
    return result


def test_a_parameter_unused_on_one_rank_changes_no_order():
    ranks = run_ranks(3, ranks_unused)
    for mode, (orders, _) in ranks[0].items():
        assert orders == [[("all_reduce", 16)] * 3] * 3, mode
    for rank in ranks:
        assert all(difference < 1e-14 for _, difference in rank.values()), rank


# ---- buckets ---------------------------------------------------------------------------------------------------------


def test_bucket_sizes_and_types():
    group = build_mesh(Degrees(), torch.device("cpu")).dp_cp
    for dtype, kept in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ):
        parameters = list(decoder(UNTIED, dtype).parameters())
        for megabytes in (0.001, 0.01, 0.05, 25.0):
            buckets = DataParallel(parameters, group, "bucket", megabytes).buckets
            assert [p for bucket in buckets for p in bucket.views] == parameters[::-1], "reverse of the forward"
            for bucket, following in zip(buckets, [*buckets[1:], None]):
                size = bucket.flat.numel() * bucket.flat.element_size()
                assert bucket.flat.dtype == kept
                assert size <= megabytes * 1e6 or len(bucket.views) == 1, "only a large parameter exceeds the limit"
                if following is not None:  # and none is closed early
                    first = next(iter(following.views))
                    assert size + first.numel() * kept.itemsize > megabytes * 1e6
                assert all(view._base is bucket.flat for view in bucket.views.values()), "views, no copies"
            assert len(DataParallel(parameters, group, "overlap").buckets) == len(parameters)
            for parameter in parameters:
                parameter._post_accumulate_grad_hooks.clear()


def test_gradients_of_bfloat16_add_up_in_float32():
    group = build_mesh(Degrees(), torch.device("cpu")).dp_cp
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weight.spec = ParameterSpec("weight", (4,), ((0, 4),), None)
    gradients = DataParallel([weight], group)
    for index in range(300):  # in bfloat16 the sum would stop at 256
        with gradients.no_sync(index < 299):
            weight.sum().backward()
    (total,) = gradients.finish()
    assert total.dtype == torch.float32 and total.tolist() == [300.0] * 4
    assert weight.grad is None, "taken from autograd at once"


def test_a_late_gradient_is_an_error():
    group = build_mesh(Degrees(), torch.device("cpu")).dp_cp
    weight = nn.Parameter(torch.ones(4))
    weight.spec = ParameterSpec("weight", (4,), ((0, 4),), None)
    DataParallel([weight], group)
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="weight: a gradient came after its bucket was launched"):
        weight.sum().backward()


class NoGradientForWeight(torch.autograd.Function):
    """Such as a linear layer that puts off its weight gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


def test_a_function_without_weight_gradient_fires_the_hook_and_does_no_harm():
    group = build_mesh(Degrees(), torch.device("cpu")).dp_cp
    weight = nn.Parameter(torch.ones(4))
    weight.spec = ParameterSpec("weight", (4,), ((0, 4),), None)
    gradients = DataParallel([weight], group)
    x = torch.ones(4, requires_grad=True)
    NoGradientForWeight.apply(x, weight).sum().backward()
    gradients.accumulate(weight, torch.full((4,), 5.0))  # it comes by another way
    assert gradients.finish()[0].tolist() == [5.0] * 4
    assert gradients.finish()[0].tolist() == [0.0] * 4, "a step without any gradient"
