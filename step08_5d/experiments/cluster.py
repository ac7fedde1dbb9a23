"""What only a cluster can show: a step of Llama 3 405B on 16,384 GPUs, predicted and published."""

from dataclasses import dataclass

from common.costs.alpha_beta import Player
from common.costs.hardware import H100_TFLOPS, NETWORK, NVLINK
from common.counts import count_flops, count_parameters
from common.drawing.figures import COLOURS, DIMENSIONS, new_figure, save_figure
from common.drawing.tables import print_table
from common.link import Link
from common.presets import PRESETS

PEAK = H100_TFLOPS * 1e12
ALPHA = 10e-6  # seconds a message
BETA, SUM = 2, 4  # bytes of a bfloat16 activation or weight, and of a gradient's sum

# ---- Llama 3 405B ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A configuration of Llama 3 405B with its speed, both published: arXiv:2407.21783, table 4."""

    gpus: int
    cp: int
    dp: int
    seq: int
    sequences: int  # of each data-parallel rank in a step: its micro-batches, of one sequence each
    tflops: float  # per GPU
    mfu: float
    tp: int = 8
    pp: int = 16

    @property
    def name(self) -> str:
        return f"{self.gpus:,} GPUs, cp {self.cp}"


RUNS = (
    Run(8192, 1, 64, 8192, 32, 430, 0.43),
    Run(16384, 1, 128, 8192, 16, 400, 0.41),
    Run(16384, 16, 8, 131072, 16, 380, 0.38),
)
LLAMA = PRESETS["llama3-405b"]
VIRTUAL = (1, 8)  # stages on each rank: one, and one per layer, which is the most


@dataclass(frozen=True)
class Traffic:
    """What a rank sends for one dimension in a step, and what the rank could compute meanwhile."""

    size: float  # bytes
    seconds: float  # on the wire
    behind: float  # seconds of the computation that does not depend on it


def step_seconds(run: Run) -> float:
    """What a rank computes in a step at the peak, without the half of the attention's scores that is masked."""
    flops = count_flops(LLAMA, run.seq)
    return 3 * (flops.forward - flops.attention_core / 2) * run.dp * run.sequences / run.gpus / PEAK


def traffic(run: Run, virtual: int) -> dict[str, Traffic]:
    """Of each dimension, in our implementation: sequence parallelism, keys and values gathered, ZeRO-1.

    All collectives are rings: each of N ranks sends (N-1)/N of the whole.
    """
    layers, tokens, compute = LLAMA.layers / run.pp, run.seq // run.cp, step_seconds(run)
    count = count_parameters(LLAMA)
    times = layers * run.sequences  # a rank runs so many layers of micro-batches, forward and backward
    result = {}

    # tp: a layer gathers its input twice and scatters its output twice; so does its backward, which gathers twice more
    player, stream = Player(run.tp, Link(ALPHA, NVLINK)), tokens * LLAMA.hidden * BETA
    for _ in range(10):
        player.message(stream)
    result["tp"] = Traffic(times * 10 * (run.tp - 1) / run.tp * stream, times * player.communication, compute)

    if run.cp > 1:  # keys and values of the whole sequence, forward and backward, and a scatter of their gradients
        player = Player(run.cp, Link(ALPHA, NETWORK))
        keys = 2 * run.seq * LLAMA.kv_heads * LLAMA.head_width // run.tp
        for width in (BETA, BETA, SUM):
            player.message(keys * width)
        sent = (run.cp - 1) / run.cp * keys * (2 * BETA + SUM)
        result["cp"] = Traffic(times * sent, times * player.communication, compute)

    player, message = Player(2, Link(ALPHA, NETWORK)), stream / run.tp
    player.exchange(message)
    hops = 2 * run.sequences * virtual  # one forward and one backward for each micro-batch and stage
    result["pp"] = Traffic(hops * message, hops * player.communication, compute)

    ranks, parameters = run.dp * run.cp, count.total / run.tp / run.pp
    player = Player(ranks, Link(ALPHA, NETWORK))
    player.message(parameters * SUM)  # gradients
    player.message(parameters * BETA)  # weights
    sent = (ranks - 1) / ranks * parameters * (SUM + BETA)
    # The last p micro-batches finish a rank's stages one after the other: only the last stage has nothing behind it but
    # its own last micro-batch
    others = min(1, run.pp / run.sequences) * (virtual - 1)
    behind = compute * (others + 1 / run.sequences) / virtual
    result["dp"] = Traffic(sent, player.communication, behind)
    return result


def bubble(run: Run, virtual: int) -> float:
    """(p - 1) / (v m): idle time of a rank over the time it computes, in an interleaved 1F1B."""
    return (run.pp - 1) / (virtual * run.sequences)


def llama(quick: bool) -> None:
    """PREDICTED and PUBLISHED: a step of Llama 3 405B on 8,192 and 16,384 GPUs, dimension by dimension."""
    print(f"\npeak {H100_TFLOPS:g} TFLOP/s, NVLink 450 GB/s, network 50 GB/s out of each GPU; tp 8, pp 16")
    rows, bounds, bars = [], [], {}
    for run in RUNS:
        compute = step_seconds(run)
        published = compute * PEAK / run.tflops / 1e12
        for virtual in VIRTUAL:
            sent, idle = traffic(run, virtual), compute * bubble(run, virtual)
            late = {name: max(0.0, each.seconds - each.behind) for name, each in sent.items()}
            best = compute + idle + sum(late.values())
            worst = compute + idle + sum(each.seconds for each in sent.values())
            cells = (f"{compute:.2f}", f"{idle / compute:.0%}", f"{best:.2f}", f"{worst:.2f}", f"{published:.2f}")
            mfu = (f"{compute / best:.0%}", f"{compute / worst:.0%}", f"{run.mfu:.0%}")
            bounds.append((f"{run.name}, v {virtual}", *cells, *mfu))
            parts = {"computes": compute, "bubble": idle} | {name: each.seconds for name, each in sent.items()}
            bars[f"{run.name}, v {virtual}"] = parts, published
        for name, each in sent.items():
            cells = ("NVLink" if name == "tp" else "network", f"{each.size / 1e9:,.1f}", f"{each.seconds:.2f}")
            shares = (f"{each.seconds / compute:.1%}", f"{each.behind:.2f}", f"{late[name]:.2f}")
            rows.append((f"{run.name}: {name}", *cells, *shares))
    header = ("", "over", "GB sent", "s on the wire", "of the computation", "may hide behind, s", "cannot hide, s")
    print_table(f"predicted: what a GPU sends in a step, v {virtual}", header, rows)
    header = ("", "computes, s", "bubble", "all hides, s", "nothing hides, s", "published, s")
    header += ("MFU if all hides", "nothing hides", "published")
    print_table("predicted: a step, beside the published speed", header, bounds)
    if not quick:
        draw_llama(bars)


def draw_llama(bars: dict[str, tuple[dict[str, float], float]]) -> None:
    """A step as bars end to end, as if nothing could hide, and the published time as a line."""
    from matplotlib.patches import Patch

    colours = {"computes": COLOURS["forward"], "bubble": "#D9D9D9"} | {
        n: DIMENSIONS[n] for n in ("tp", "cp", "pp", "dp")
    }
    figure, axis = new_figure(width=9.5, height=4.2)
    for line, (parts, published) in enumerate(bars.values()):
        left = 0.0
        for name, seconds in parts.items():
            axis.barh(line, seconds, 0.66, left, color=colours[name], edgecolor="white", linewidth=0.5)
            left += seconds
        axis.plot([published] * 2, [line - 0.45, line + 0.45], color="black", linewidth=2.5)
    handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    handles += axis.plot([], [], color="black", linewidth=2.5, label="published")
    axis.set_yticks(range(len(bars)), bars)
    axis.set(xlabel="seconds of a step", ylim=(len(bars) - 0.4, -0.6))
    axis.set_title(
        "predicted: a step of Llama 3 405B, H100 at its peak, messages end to end; v stages on each rank",
        fontsize=10,
        loc="left",
    )
    axis.grid(visible=False, axis="y")
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False, fontsize=9)
    save_figure(figure, "llama")
