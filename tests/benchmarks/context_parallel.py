"""Step 6 against PyTorch's ring attention, zig-zag against contiguous, several ranks against one.

    python -m tests.benchmarks.context_parallel                    # 2 and 4 gloo ranks, 30 pairs each
    python -m tests.benchmarks.context_parallel --ranks 2 --pairs 3 --seq 512 --growth 1 2

In each of the first two parts, two ways to do the same take turns in one run:
  attention  forward and backward of one layer's attention; the peer is PyTorch's private ring for `context_parallel`,
             with the CPU's FlashAttention for its kernel, which its public interface does not offer
  splits     a whole training step, under both splits
The last part has one side. It measures a training step for ranks that share a sequence, and for sequences that grow
with their number: time per token, and peak memory of the fullest rank.
"""

import os
import statistics
import time

import torch
import torch.distributed as dist

from common import collectives
from common.config import TrainConfig
from common.model_config import ModelConfig
from common.process_groups import Degrees, Mesh, build_mesh
from step01_single_gpu.clipping import clip_factor, gradient_norm
from step06_context_parallel.context_parallel import attention, take_part
from step06_context_parallel.layouts import Layout
from step06_context_parallel.train import build
from tests.benchmarks.paired import HEAP, compare, keep, measure_steps, parse_options, peak_bytes
from tests.harness.ranks import run_ranks

# One layer, 1 M parameters: of long sequences, most of the work is attention
MODEL = ModelConfig(vocab=384, hidden=256, layers=1, heads=8, kv_heads=4, ffn=768, tie_embeddings=False)
PEERS = {"ring": "ALL_TO_ALL", "allgather": "ALL_GATHER"}


def mesh_of_all(cp: int) -> Mesh:
    return build_mesh(Degrees(cp=cp), torch.device("cpu"))


def configuration(cp: int, seq: int, **flags) -> TrainConfig:
    config = TrainConfig(cp=cp, dp=1, seq_len=seq, micro_batch=1, global_batch=1, **flags)
    config.__dict__["model_config"] = MODEL
    return config


# ---- attention alone, against PyTorch's ------------------------------------------------------------------------------


def inputs(seq: int, mesh: Mesh) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, of this rank's part of a sequence split zig-zag."""
    random, mine = torch.Generator().manual_seed(0), Layout("zigzag", seq, mesh.cp.size).positions(mesh.cp.rank)
    heads = MODEL.heads, MODEL.kv_heads, MODEL.kv_heads, MODEL.heads
    return [torch.randn(1, each, seq, MODEL.head_width, generator=random)[:, :, mine] for each in heads]


def total_norm(tensors: list[torch.Tensor]) -> float:
    """A number in which all results show."""
    return sum(each.norm().item() for each in tensors)


def our_attention(mode: str, seq: int, mesh: Mesh):
    *qkv, gradient = inputs(seq, mesh)
    config = configuration(mesh.cp.size, seq, cp_mode=mode)
    for each in qkv:
        each.requires_grad_()

    def step():
        out = attention(*qkv, config=config, cp=mesh.cp)
        return total_norm([out, *torch.autograd.grad(out, qkv, gradient)])

    return step


def peer_attention(mode: str, seq: int, mesh: Mesh):
    from torch.distributed.tensor.experimental._context_parallel import _attention as peer

    q, k, v, gradient = inputs(seq, mesh)
    peer._cp_options.rotate_method = getattr(peer._RotateMethod, PEERS[mode])
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def step():
        out, lse = peer._templated_ring_attention(mesh.cp.handle, 2, kernel, q, k, v, is_causal=True, dropout_p=0.0)
        results = q, k, v, out, lse
        gradients = peer._templated_ring_attention_backward(
            mesh.cp.handle, 2, backward, gradient, "grad_out", *results, is_causal=True, dropout_p=0.0
        )
        return total_norm([out, *gradients])

    return step


def attention_on_rank(case: tuple[str, int], pairs: int, sides: tuple[str, ...]):
    """What `measure_steps` returns."""
    mesh, make = mesh_of_all(dist.get_world_size()), {"ours": our_attention, "peer": peer_attention}
    return measure_steps([make[side](*case, mesh) for side in sides], pairs, mesh.device)


# ---- whole training steps --------------------------------------------------------------------------------------------


def training_step(split: str, seq: int, mesh: Mesh):
    """One training step of step 6 as a function without arguments."""
    config = configuration(mesh.cp.size, seq, cp_split=split)
    pipeline, optimizer = build(config, mesh)
    tokens = torch.randint(MODEL.vocab, (1, seq + 1), generator=torch.Generator().manual_seed(0))

    def step():
        loss = pipeline.run(lambda _: take_part(tokens[:, :-1], tokens[:, 1:], config, mesh, None), seq)
        gradients = pipeline.finish()
        norm = gradient_norm(optimizer.parameters, gradients, mesh.world)
        optimizer.step(gradients, config.lr, clip_factor(norm, config.clip))
        collectives.all_reduce(loss, mesh.dp_cp)
        return loss.item()

    return step


def splits_on_rank(seq: int, pairs: int, sides: tuple[str, ...]):
    """What `measure_steps` returns for zig-zag (ours) and contiguous (the peer)."""
    mesh, splits = mesh_of_all(dist.get_world_size()), {"ours": "zigzag", "peer": "contiguous"}
    return measure_steps([training_step(splits[side], seq, mesh) for side in sides], pairs, mesh.device)


def critical_path(split: str, seq: int, ranks: int) -> int:
    """(Query, key) pairs of the slowest rank in each hop of the ring, added up."""
    plans = [Layout(split, seq, ranks).plan(rank) for rank in range(ranks)]
    pairs = [[sum(block.pairs for block in blocks) for blocks in plan.blocks] for plan in plans]
    return sum(max(pairs[rank][(rank - hop) % ranks] for rank in range(ranks)) for hop in range(ranks))


def alone_on_rank(cp: int, seq: int, steps: int) -> tuple[float, int]:
    """Median seconds of a training step, and its peak bytes."""
    mesh, times = mesh_of_all(cp), []
    step = training_step("zigzag", seq, mesh)
    for _ in range(steps + 2):
        collectives.barrier(mesh.world)
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]), peak_bytes(step, mesh.device, warmup=0, steps=3)


def growth(ranks: list[int], seq: int, steps: int) -> dict[str, dict]:
    """Of one sequence for all ranks, and of a sequence with `seq` tokens for each rank."""
    rows = {}
    for title, length in ("one sequence", lambda cp: 2 * seq), ("longer sequences", lambda cp: seq * cp):
        print(f"{title}: time per token, and peak memory of the fullest rank")
        for cp in ranks:
            seconds, peaks = zip(*run_ranks(cp, alone_on_rank, cp, length(cp), steps, timeout=1800), strict=True)
            row = {"seq_len": length(cp), "us_per_token": max(seconds) / length(cp) * 1e6, "peak_bytes": max(peaks)}
            rows[f"{title.replace(' ', '_')}_{cp}_ranks"] = row
            print(f"  cp {cp}, {length(cp):6,} tokens   {row['us_per_token']:8.1f} us   {max(peaks) / 1e6:8.1f} MB")
    return rows


def main() -> None:
    # by the names under which ranks can import them
    from tests.benchmarks.context_parallel import attention_on_rank, growth, splits_on_rank

    arguments = parse_options(__doc__, pairs=30, seq=4096, modes=list(PEERS), growth=[1, 2, 4])
    seq, rows = arguments.seq, {}
    print("step 6 / torch's ring attention: throughput, median of pairs [95% interval]; peak memory")
    for world in arguments.ranks:
        for mode in arguments.modes:
            title = f"{mode} against {PEERS[mode]}, {seq:,} tokens"
            rows[f"{mode}_{world}_ranks"] = compare(title, world, attention_on_rank, (mode, seq), arguments.pairs)
    print("zig-zag / contiguous, a training step; and the ratio of their critical paths")
    for world in arguments.ranks:
        row = compare(f"{2 * seq:,} tokens", world, splits_on_rank, 2 * seq, arguments.pairs)
        ratio = critical_path("contiguous", 2 * seq, world) / critical_path("zigzag", 2 * seq, world)
        print(f"    attention on the critical path {ratio:.3f}", flush=True)
        rows[f"zigzag_{world}_ranks"] = row | {"critical_path_ratio": ratio}
    os.environ.update(HEAP)  # for the ranks
    rows |= growth(arguments.growth, seq, 5)
    print(f"written: {keep('context_parallel', rows)}")


if __name__ == "__main__":
    main()
