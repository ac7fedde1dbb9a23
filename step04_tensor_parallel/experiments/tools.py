"""What the experiments of this step share: a model cut over ranks that can be looked into."""

import functools
from collections.abc import Callable

import torch

from common.config import TrainConfig
from common.data.batches import load_batches
from common.experiments.local_ranks import on_ranks
from common.model import ATTENTION_CORES, Decoder
from common.process_groups import Degrees, Mesh, build_mesh
from common.reductions import gradient_norm, sum_extra_groups
from common.tracing.tracer import Tracer
from step01_single_gpu.recompute import apply_recompute
from step02_data_parallel.experiments.tools import against
from step03_zero.zero import Zero
from step04_tensor_parallel.tensor_parallel import apply_tensor_parallel
from step04_tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy_sum

# Grouped queries (8 heads share 4 K/V heads), so that tp 4 leaves one K/V head to each rank
SHAPE = {"layers": 2, "hidden": 256, "ffn": 768, "heads": 8, "kv_heads": 4, "data": "synthetic", "warmup": 1}
SHAPE |= {"seq_len": 128, "micro_batch": 2, "global_batch": 2}

WAYS = {  # name: flags
    "no SP, plain": {"sequence_parallel": False, "tp_mode": "plain"},
    "no SP, overlap": {"sequence_parallel": False, "tp_mode": "overlap"},
    "SP, plain": {"tp_mode": "plain"},
    "SP, overlap": {"tp_mode": "overlap"},
    "SP, chunked": {"tp_mode": "chunked"},
}

mesh_of = functools.cache(build_mesh)  # groups once for all cases of a layout: all ranks run the same cases


class Run:
    """train.py's model and gradients on these ranks, without its record and its optimizer."""

    def __init__(self, mesh: Mesh, **flags):
        self.config = config = TrainConfig(device="cpu", **flags)
        config.resolve_and_check(mesh.world.size)
        self.mesh = mesh_of(Degrees.of(config), mesh.device, config.model_config.kv_heads)
        self.batches = load_batches(config, mesh)
        self.model = Decoder(config.model_config, ATTENTION_CORES[config.attention])
        apply_tensor_parallel(self.model, config, self.mesh)
        apply_recompute(self.model, config.recompute)
        self.zero = Zero(self.model, config, self.mesh)
        self.phase = Tracer(None, self.mesh, None).phase

    def logits_and_targets(self, index: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's forward of one micro-batch."""
        place = (self.mesh.dp.rank, self.mesh.dp.size)
        tokens, targets = self.batches.micro_batch(0, index, self.config.micro_batch, *place)
        return self.model(tokens), targets

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """This micro-batch's share of the mean."""
        vocab = self.config.model_config.vocab
        return vocab_parallel_cross_entropy_sum(logits, targets, vocab, self.mesh.tp) / self.batches.target_tokens

    def gradients(self) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches: the finished gradients, one for each of `zero.shards`."""
        self.zero.gather()
        accumulation = self.config.accumulation_steps
        for index in range(accumulation):
            with self.phase("forward"):
                share = self.loss(*self.logits_and_targets(index))
            with self.phase("backward"), self.zero.no_sync(index < accumulation - 1):
                share.backward()
        with self.phase("optimizer"):
            summed = self.zero.finish()
            sum_extra_groups(self.zero.shards, summed, self.mesh)
            gradient_norm(self.zero.shards, summed, self.mesh.world)
        return summed


def on_every_case(mesh: Mesh, done: Callable, function: Callable, cases: list[dict]) -> list:
    """On a rank: `function(run)` for a `Run` with each of the flags in `cases`."""
    results = []
    for flags in cases:
        results.append(function(Run(mesh, **flags)))
        done()
    return results


# ---- gradients against one process -----------------------------------------------------------------------------------


def compare_gradients(on_every_case: Callable, difference: Callable, cases: list[tuple[int, str, dict]]) -> None:
    """Print a table of the largest difference for each case, over its ranks.

    Args:
        on_every_case: as above, of this step or another; `difference` is what it calls for each case.
        cases: (ranks, name, flags).
    """
    rows = []
    for ranks in sorted({ranks for ranks, *_ in cases}):
        names, flags = zip(*[(name, flags) for size, name, flags in cases if size == ranks])
        found = on_ranks(ranks, on_every_case, difference, list(flags), title="gradients", jobs=len(flags))
        rows += [(f"{ranks} ranks, {name}", 0.0, max(worst)) for name, worst in zip(names, zip(*found))]
    against("largest ||a - b|| / ||b|| of any rank's part of any parameter's gradient, float64", "", rows, ".1e")
    print(f"  largest of all: {max(worst for *_, worst in rows):.1e}")


def worst_difference(
    shards: list[torch.Tensor], gradients: list[torch.Tensor], whole: dict[str, torch.Tensor]
) -> float:
    """The largest ||a - b|| / ||b|| of a shard's gradient and its part of the whole one."""
    worst = 0.0
    for shard, gradient in zip(shards, gradients, strict=True):
        squares = [0.0, 0.0]
        for box, mine in shard.spec.boxes(gradient):
            expected = whole[shard.spec.name][tuple(slice(*bounds) for bounds in box)]  # rows that pad are cut off
            squares[0] += (mine[tuple(map(slice, expected.shape))] - expected).square().sum().item()
            squares[1] += expected.square().sum().item()
        worst = max(worst, (squares[0] / max(squares[1], 1e-300)) ** 0.5)
    return worst
