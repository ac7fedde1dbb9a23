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
from common.drawing.figures import SERIES, new_figure, write_png
from step07_expert_parallel import experts as module
from step07_expert_parallel.moe import MoE
from tests.benchmarks.paired import compare, keep, parse_options, run_as_module
from tests.harness.observing import configure
from tests.harness.ranks import ROOT
from tests.mechanisms.step07.test_moe import layer_of

HIDDEN, WIDTH, TOP_K, FEW = 256, 512, 2, 64  # FEW: tokens for batched_mm
LABELS = {"grouped_mm": "transformers, grouped_mm", "eager": "transformers, eager", "loop": "ours, loop over experts"}


def configuration(experts: int, tokens: int) -> TrainConfig:
    """Of one layer, and a sequence of this many tokens."""
    flags = f"--layers 1 --hidden {HIDDEN} --expert-ffn {WIDTH} --experts {experts} --top-k {TOP_K} --balance none"
    return configure(7, f"{flags} --seq-len {tokens} --micro-batch 1 --global-batch 1 --device cpu", 1)


def transformers_layer(implementation: str, ours: MoE) -> torch.nn.Module:
    """Mixtral's block with our layer's weights."""
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    shape = {"num_local_experts": ours.router.shape.experts, "num_experts_per_tok": TOP_K}
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
    return mock.patch.object(module, "_has_kernel", lambda *_: False)(forward_and_backward(ours, tokens))


def draw(rows: dict[str, dict], experts: list[int]) -> None:
    """Time and ratio over the number of experts. A peer's time is ours times the ratio of the pairs: drift cancels."""
    figure, (times, ratios) = new_figure(columns=2, width=9)
    ours = [min(rows[f"{peer}_{count}_experts"]["ours_s"] for peer in LABELS) * 1e3 for count in experts]
    times.loglog(experts, ours, "o-", color=SERIES[0], label="ours")
    for (peer, label), colour in zip(LABELS.items(), SERIES[1:]):
        found = [rows[f"{peer}_{count}_experts"] for count in experts]
        medians, lows, highs = ([row[key] for row in found] for key in ("median", "low", "high"))
        peers = [time * ratio for time, ratio in zip(ours, medians, strict=True)]
        times.loglog(experts, peers, "o-", color=colour, label=label)
        ratios.fill_between(experts, lows, highs, color=colour, alpha=0.2, linewidth=0)
        ratios.semilogx(experts, medians, "o-", color=colour, label=f"against {label}")
    ratios.axhline(1, color="black", linewidth=1)
    times.set(ylabel="ms, forward and backward", yticks=(ticks := (100, 200, 500, 1000, 2000)), yticklabels=ticks)
    ratios.set(ylabel="our throughput / theirs", ylim=(0.9, 1.5))  # eager leaves it soon
    for axis in (times, ratios):
        axis.set(xlabel="experts, two for each token", xticks=experts, xticklabels=experts)
        axis.minorticks_off()
        axis.legend(fontsize=8)
    print(f"figure: {write_png(figure, ROOT / 'step07_expert_parallel/figures/experts_benchmark.png')}")


def main() -> None:
    options, rows = parse_options(__doc__, experts=[4, 8, 16, 32, 64], tokens=2048), {}
    cases = [(peer, experts, options.tokens) for experts in options.experts for peer in LABELS]
    print("our layer / transformers' and a loop: throughput, median of pairs [95% interval]; peak memory")
    for peer, experts, tokens in [*cases, ("batched_mm", options.experts[0], FEW)]:
        title = f"{peer}, {experts} experts, {tokens:,} tokens"
        sides = partial(our_layer, experts, tokens), partial(peer_layer, peer, experts, tokens)
        rows[f"{peer}_{experts}_experts"] = compare(title, 1, *sides, options.pairs) | {"tokens": tokens}
    keep("expert_parallel", rows)
    draw(rows, options.experts)


if __name__ == "__main__":
    run_as_module("expert_parallel")
