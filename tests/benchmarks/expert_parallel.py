"""Step 7's layer with experts against transformers' Mixtral and against a loop over experts.

    python -m tests.benchmarks.expert_parallel                     # 30 pairs each
    python -m tests.benchmarks.expert_parallel --experts 8 --pairs 5

Forward and backward of one layer, router included, with the same weights, in one process. The peers of ours are
transformers' implementations (batched_mm copies an expert's matrices for every row, so that it is measured with few
tokens only) and our layer without PyTorch's grouped product (loop). The number of experts grows, and every token goes
through two of them, so that the FLOPs stay the same.
"""

from functools import partial
from unittest import mock

import torch

from common.config import TrainConfig
from step07_expert_parallel import experts as module
from step07_expert_parallel.moe import MoE
from tests.benchmarks.kept import keep
from tests.benchmarks.paired import compare, parse_options, run_as_module
from tests.harness.observing import configure
from tests.mechanisms.step07.test_moe import layer_of

HIDDEN, WIDTH, TOP_K, FEW = 256, 512, 2, 64  # FEW: tokens for batched_mm
PEERS = "grouped_mm", "eager", "loop"  # two of transformers, and ours with a loop over experts


def configuration(experts: int, tokens: int) -> TrainConfig:
    """Of one layer, and a sequence of this many tokens."""
    flags = f"--layers 1 --hidden {HIDDEN} --expert-ffn {WIDTH} --experts {experts} --top-k {TOP_K} --balance none"
    return configure(7, f"{flags} --seq-len {tokens} --micro-batch 1 --global-batch 1 --device cpu", 1)


def transformers_layer(implementation: str, ours: MoE) -> torch.nn.Module:
    """Mixtral's block with our layer's weights."""
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    shape = {"num_local_experts": ours.router.routing.experts, "num_experts_per_tok": TOP_K}
    shape |= {"hidden_size": HIDDEN, "intermediate_size": WIDTH}
    layer = MixtralSparseMoeBlock(MixtralConfig(**shape, experts_implementation=implementation))
    layer.gate.weight.data = ours.router.weight.data
    layer.experts.gate_up_proj.data = torch.cat((ours.experts.gate_proj.data, ours.experts.up_proj.data), 1)
    layer.experts.down_proj.data = ours.experts.down_proj.data
    return layer


def forward_and_backward(layer: torch.nn.Module, tokens: int):
    """A function without arguments that returns a number in which results show."""
    x, gradient = torch.randn(2, 1, tokens, HIDDEN, generator=torch.Generator().manual_seed(0))
    parameters = [x.requires_grad_(), *layer.parameters()]

    def step():
        out = layer(x)
        of_x, *_ = torch.autograd.grad(out, parameters, gradient)
        return (out.norm() + of_x.norm()).item()

    return step


def our_layer(experts: int, tokens: int):
    return forward_and_backward(layer_of(configuration(experts, tokens), 1.0), tokens)


def peer_layer(name: str, experts: int, tokens: int):
    ours = layer_of(configuration(experts, tokens), 1.0)
    if name != "loop":
        return forward_and_backward(transformers_layer(name, ours), tokens)
    return mock.patch.object(module, "has_kernel", lambda *_: False)(forward_and_backward(ours, tokens))


def main() -> None:
    options, rows = parse_options(__doc__, experts=[4, 8, 16, 32, 64], tokens=2048), {}
    cases = [(peer, experts, options.tokens) for experts in options.experts for peer in PEERS]
    print("our layer / transformers' and a loop: throughput, median of pairs [95% interval]; peak memory")
    for peer, experts, tokens in [*cases, ("batched_mm", options.experts[0], FEW)]:
        title = f"{peer}, {experts} experts, {tokens:,} tokens"
        sides = partial(our_layer, experts, tokens), partial(peer_layer, peer, experts, tokens)
        rows[f"{peer}_{experts}_experts"] = compare(title, 1, *sides, options.pairs) | {"tokens": tokens}
    keep("expert_parallel", rows, options.pairs, options.whole)


if __name__ == "__main__":
    run_as_module("expert_parallel")
