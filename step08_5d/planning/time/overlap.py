"""Does it hide? Each dimension's communication over the computation that may run meanwhile, for one's own numbers.

Three ratios stand side by side: the playbook's formula as it is printed (appendix A3; for ZeRO-2 and experts its
cheatsheet), the same formula corrected for 2-byte values, and ours, with the widths and products of our training. All
are communication / computation, so up to 1 all of it can hide. The formulas are those of the steps' `cost.py`.
"""

from argparse import ArgumentParser, Namespace
from typing import NamedTuple

from common.costs.alpha_beta import gather_ratio
from common.costs.vocabulary import WIDTHS
from common.counts import count_parameters
from common.drawing.tables import print_table
from common.errors import UsageError
from common.model_config import ModelConfig
from step02_data_parallel import cost as data
from step03_zero import cost as zero
from step05_pipeline import cost as pipeline
from step06_context_parallel import cost as context
from step07_expert_parallel import cost as experts
from step08_5d.planning.command_line import Command, add_degrees, add_model, model_of, speed

DEGREES = ("dp", "tp", "pp", "cp", "ep")
RULE = 10  # a rule of thumb: computation : communication should be more than this to 1


class Speeds(NamedTuple):
    """What a GPU does."""

    peak: float  # FLOP/s that its products reach
    near: float  # bytes/s to GPUs of its node
    far: float  # bytes/s to GPUs of other nodes


class Ratio(NamedTuple):
    """One dimension."""

    name: str
    sent: str
    behind: str
    printed: float | None
    corrected: float
    ours: float
    wrong: str  # with what is printed

    @property
    def computation(self) -> float:
        """To one of communication, by ours."""
        return 1 / self.ours


def rows(
    model: ModelConfig, seq: int, micro_batch: int, degrees: dict[str, int], speeds: Speeds, near: tuple[str, ...]
) -> list[Ratio]:
    """Return a row for each dimension of more than one rank.

    Args:
        degrees: ranks by dimension (`DEGREES`). near: dimensions whose groups lie within a node.
    """
    peak, (narrow, wide, _) = speeds.peak, WIDTHS["bfloat16"]
    speed = {name: speeds.near if name in near else speeds.far for name in DEGREES}
    tokens = micro_batch * seq / degrees["cp"]
    dp, tp, pp, cp, ep = (degrees[name] for name in DEGREES)
    h, result = model.hidden, []
    if dp > 1:
        count, at = count_parameters(model).total, speed["dp"]
        needed = [data.tokens_to_hide(dp, at, peak, width) / tokens for width in (narrow, wide)]
        printed = data.printed_ratio(count, tokens, dp, at, peak)
        wrong = "the number of parameters should cancel; no bytes"
        result.append(Ratio("dp", "all-reduce of gradients", "the backward", printed, *needed, wrong))
        needed = [zero.tokens_to_hide_scatter(dp, at, peak, width) / tokens for width in (narrow, wide)]
        printed = zero.cheatsheet_zero2(dp, at, peak, tokens, count)
        result.append(Ratio("ZeRO-2", "reduce-scatter of gradients", "the backward", printed, *needed, wrong))
        needed = [zero.tokens_to_hide_gather(dp, at, peak, narrow) / tokens] * 2
        printed = zero.appendix_a3(dp, at, peak, tokens)
        result.append(Ratio("ZeRO-3", "all-gather of weights", "the forward", printed, *needed, "no bytes"))
    if tp > 1:
        printed, corrected = (gather_ratio(tp, h, peak, speed["tp"], beta) for beta in (1, narrow))
        ours = gather_ratio(tp, 2 * model.ffn, peak, speed["tp"], narrow)
        wrong = "no bytes; products have more than h columns"
        result.append(Ratio("tp", "all-gather of a sequence", "gate and up", printed, corrected, ours, wrong))
    if pp > 1:
        layers = model.layers / pp
        printed, corrected = (pipeline.hide_ratio(h, layers, peak, speed["pp"], beta) for beta in (1, narrow))
        ours = pipeline.hide_ratio_of(model, seq, layers, peak, speed["pp"], narrow)
        result.append(
            Ratio("pp", "a micro-batch's stream", "the next stage's forward", printed, corrected, ours, "no bytes")
        )
    if cp > 1:
        share = context.pair_width(model) / (model.heads * (model.head_width + model.value_width))
        needed = context.tokens_to_hide(peak, speed["cp"], share) / (seq / cp)
        result.append(Ratio("cp", "keys and values, one hop", "attention of a hop", None, needed, needed, "no formula"))
    if ep > 1:
        printed = experts.cheatsheet(model, peak, speed["ep"], ep)
        needed = experts.width_to_hide(peak, speed["ep"], ep, narrow) / model.expert_ffn
        wrong = "more experts would cost less; width for hidden"
        result.append(Ratio("ep", "dispatch and combine", "the experts", printed, needed, needed, wrong))
    return result


def add_flags(parser: ArgumentParser) -> None:
    add_model(parser)
    add_degrees(parser)
    parser.add_argument("--peak", type=speed, default=989, help="TFLOP/s that a GPU's products reach")
    parser.add_argument("--bandwidth", type=speed, default=450, help="GB/s of a GPU to others of its node")
    parser.add_argument("--between", type=speed, default=50, help="GB/s of a GPU to other nodes")
    parser.add_argument("--near", nargs="*", choices=DEGREES, default=["tp"], help="within a node")


def show(options: Namespace) -> None:
    """Does it hide? Each dimension's communication over the computation that may run meanwhile, for your numbers."""
    model = model_of(options)
    degrees = {name: getattr(options, name) for name in DEGREES}
    if degrees["ep"] > 1 and not model.experts:
        raise UsageError(f"{options.model} has no experts for --ep {degrees['ep']}; try --model mixtral-8x7b")
    if max(degrees.values()) == 1:
        raise UsageError("no degree is more than 1: try --dp 8")
    speeds = Speeds(1e12 * options.peak, 1e9 * options.bandwidth, 1e9 * options.between)
    found = rows(model, options.seq_len, options.micro_batch, degrees, speeds, tuple(options.near))
    cells = [
        (
            f"{row.name} {degrees.get(row.name, degrees['dp'])}",
            f"{row.sent} / {row.behind}",
            f"{row.printed:.3g}" if row.printed is not None else "-",
            f"{row.corrected:.3g}",
            f"{row.ours:.3g}",
            f"{row.computation:.1f} : 1" + ("" if row.computation > RULE else " *"),
            row.wrong,
        )
        for row in found
    ]
    title = (
        f"predicted: {options.model}, {options.micro_batch} x {options.seq_len:,} tokens, {options.peak:g} TFLOP/s, "
        f"{options.bandwidth:g} GB/s for {', '.join(options.near) or 'nothing'}, {options.between:g} for the others"
    )
    header = ("", "communication / computation", "printed", "corrected", "ours", "computation", "wrong in print")
    print_table(title, header, cells)
    print(f"  up to 1 it hides; * less than {RULE} : 1, so that it is worth a look")


COMMAND = Command(add_flags, show)
