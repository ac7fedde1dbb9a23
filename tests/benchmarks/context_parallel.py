"""Step 6 against PyTorch's ring attention, and zig-zag against contiguous.

    python -m tests.benchmarks.context_parallel                    # 2 and 4 gloo ranks, 30 pairs each
    python -m tests.benchmarks.context_parallel --ranks 2 --pairs 3 --seq 512

First, forward and backward of one layer's attention: the peer is PyTorch's private ring for `context_parallel`, with
the CPU's FlashAttention for its kernel, which its public interface does not offer. Then a training step under both
splits.
"""

from functools import partial

import torch
from torch.distributed.tensor.experimental._context_parallel import _attention as peer

from common.config import TrainConfig
from common.process_groups import Mesh
from step06_context_parallel.context_parallel import attention
from step06_context_parallel.sequence_layouts import token_positions
from tests.benchmarks.kept import keep
from tests.benchmarks.paired import compare, our_step, parse_options, run_as_module
from tests.harness.observing import configure, mesh_of

# One layer, 1 M parameters: of long sequences, most of the work is attention
MODEL = "--model llama3-1b --vocab 384 --hidden 256 --layers 1 --heads 8 --kv-heads 4 --ffn 768 --no-tie-embeddings"
MODEL += " --micro-batch 1 --global-batch 1 --device cpu"
HEADS, WIDTH = (8, 4, 4, 8), 32  # of queries, keys, values and the output's gradient
PEERS = {"ring": "ALL_TO_ALL", "allgather": "ALL_GATHER"}


def flags_of(seq: int, cp: int, flags: str = "") -> str:
    return f"{MODEL} --seq-len {seq} --cp {cp} {flags}"


def prepare_inputs(flags: str) -> tuple[TrainConfig, Mesh, list[torch.Tensor]]:
    """With q, k, v and the gradient of the output, of this rank's part of a sequence split zig-zag."""
    config = configure(6, flags)
    mesh, seq, random = mesh_of(config), config.seq_len, torch.Generator().manual_seed(0)
    mine = token_positions("zigzag", seq, mesh.cp.size, mesh.cp.rank)
    return config, mesh, [torch.randn(1, heads, seq, WIDTH, generator=random)[:, :, mine] for heads in HEADS]


def total_norm(tensors: list[torch.Tensor]) -> float:
    """A number in which all results show."""
    return sum(each.norm().item() for each in tensors)


def our_attention(flags: str):
    config, mesh, (*qkv, gradient) = prepare_inputs(flags)
    for each in qkv:
        each.requires_grad_()

    def step():
        out = attention(*qkv, config=config, cp=mesh.cp)
        return total_norm([out, *torch.autograd.grad(out, qkv, gradient)])

    return step


def peer_attention(flags: str):
    config, mesh, (q, k, v, gradient) = prepare_inputs(flags)
    peer._cp_options.rotate_method = getattr(peer._RotateMethod, PEERS[config.cp_mode])
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def step():
        out, lse = peer._templated_ring_attention(mesh.cp.handle, 2, kernel, q, k, v, is_causal=True, dropout_p=0.0)
        results = q, k, v, out, lse
        backwards = partial(peer._templated_ring_attention_backward, is_causal=True, dropout_p=0.0)
        gradients = backwards(mesh.cp.handle, 2, backward, gradient, "grad_out", *results)
        return total_norm([out, *gradients])

    return step


def main() -> None:
    options = parse_options(__doc__, seq=4096, modes=list(PEERS))
    seq, rows = options.seq, {}
    print("step 6 / torch's ring attention: throughput, median of pairs [95% interval]; peak memory")
    for world in options.ranks:
        for mode in options.modes:
            flags = flags_of(seq, world, f"--cp-mode {mode}")
            sides, title = (partial(our_attention, flags), partial(peer_attention, flags)), f"against {PEERS[mode]}"
            rows[f"{mode}_{world}_ranks"] = compare(f"{mode} {title}, {seq:,} tokens", world, *sides, options.pairs)
    print("zig-zag / contiguous, a training step")
    for world in options.ranks:
        splits = [flags_of(2 * seq, world, f"--cp-split {split}") for split in ("zigzag", "contiguous")]
        sides = [partial(our_step, 6, flags) for flags in splits]
        rows[f"zigzag_{world}_ranks"] = compare(f"{2 * seq:,} tokens", world, *sides, options.pairs)
    keep("context_parallel", rows, options.pairs, options.whole)


if __name__ == "__main__":
    run_as_module("context_parallel")
