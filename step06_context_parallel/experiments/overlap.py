"""What of the communication hides behind attention: ring, all-gather and Ulysses over a simulated slow link.

On two cores four ranks cannot compute side by side. So each pair takes as long as one says here, as layers do with
`--layer-delay`, and messages as long as `--link` says. What is measured is who waits for what.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from common.config import TrainConfig
from common.costs.alpha_beta import Player
from common.drawing.figures import figure_path
from common.drawing.tables import compared, print_table
from common.experiments.traces import TracedPart, quietest, run_parts
from common.process_groups import Mesh
from common.tracing.chrome_trace import Trace
from common.tracing.timelines import draw_timelines
from common.tracing.tracer import Tracer
from step06_context_parallel import cost
from step06_context_parallel.attention_block import FusedKernels
from step06_context_parallel.experiments.tools import MODES, SHAPE, AttentionLayer

RANKS, TOKENS = 4, 256
FLAGS = SHAPE | {"cp": RANKS, "seq_len": TOKENS, "micro_batch": 1, "global_batch": 1}
HOP = 0.02  # seconds that the forward of a later hop computes
BACKWARD = 2.5  # times a forward: five matrix products instead of two
ALPHA = 200  # microseconds
TRANSFERS = {"fast": 0.5, "as fast as a hop": 1.0, "slow": 2.0}  # time of a hop's keys and values, in hops
DRAWN = 0.75  # the same, for the picture


def overlap(quick: bool) -> None:
    """Ring, all-gather and Ulysses over links of three speeds: exposed communication and time, and timelines."""
    rows = []
    speeds = {"as fast as a hop": 1.0} if quick else TRANSFERS
    cases = [(mode, share) for share in (*speeds.values(), DRAWN) for mode in MODES]
    traces = run_parts(RANKS, one_layer, {case: case for case in cases}, 2 if quick else 6, title="overlap")
    for speed, share in speeds.items():
        for mode in MODES:
            for phase, predicted in play(mode, share).items():
                found = measure(traces[mode, share], phase)
                cells = [cell for pair in zip(predicted, found) for cell in compared(*(1e3 * x for x in pair), ".1f")]
                rows.append((f"{speed}, {mode}: {phase}", *cells))
    header = ("", "exposed: predicted", "measured", "ratio", "phase: predicted", "measured", "ratio")
    title = f"{RANKS} ranks, zigzag, {1e3 * HOP:g} ms a hop in the forward, {1e3 * BACKWARD * HOP:g} in the backward"
    print_table(f"{title}; ms of one layer", header, rows)
    panels = []
    for mode, what in (
        ("allgather", "all-gather: one big gather, then compute (numbers: hops)"),
        ("ring", "ring: fetch the next while computing"),
    ):
        blocked = sum(measure(traces[mode, DRAWN], phase)[0] for phase in ("forward", "backward"))
        panels.append((f"{what}; waits {1e3 * blocked:.0f} ms", of_rank_0(traces[mode, DRAWN], mode)))
    print(f"  figure: {draw_timelines(panels, figure_path('overlap'), 0)}")


def link_flag(share: float) -> str:
    """`--link` on which the keys and values of a hop take `share` hops."""
    gigabytes = 2 * part_bytes() / (share * HOP - ALPHA * 1e-6) / 1e9
    return f"{ALPHA},{gigabytes:.9f}"


def hops(later: float) -> list[float]:
    """Seconds that the forward of each hop computes. `later`: of a later hop; the first one has a few more pairs."""
    pairs = [cost.hop_pairs("zigzag", 0, hop, TOKENS, RANKS) for hop in range(RANKS)]
    return [later * each / pairs[1] for each in pairs]


def part_bytes() -> int:
    """Bytes of a rank's keys; those of their gradients are the same, in float32."""
    model = TrainConfig(**FLAGS).model_config
    return 4 * TOKENS // RANKS * model.kv_heads * model.head_width


# ---- measured --------------------------------------------------------------------------------------------------------


def one_layer(mesh: Mesh, case: tuple[str, float]) -> TracedPart:
    """On a rank: forward and backward of one layer in a (mode, transfer in hops)."""
    mode, share = case
    slow = SlowKernels(HOP)
    layer = AttentionLayer(mesh, slow, **FLAGS | MODES[mode], link=link_flag(share))

    def step(tracer: Tracer) -> None:
        slow.tracer = tracer
        for phase in ("forward", "backward"):
            with tracer.phase(phase):
                getattr(layer, phase)()

    return TracedPart(step, layer.mesh)


class SlowKernels(FusedKernels):
    """PyTorch's kernels, each of which takes the time of its pairs: a phase of its own, with a number.

    Args:
        hop: seconds that the forward of a later hop computes.
    """

    def __init__(self, hop: float):
        self.per_pair = hop / cost.hop_pairs("zigzag", 0, 1, TOKENS, RANKS) / FLAGS["heads"]
        self.tracer, self.count = None, {"forward": 0, "backward": 0}

    def attend(self, q, k, v, causal):
        return self.block(partial(super().attend, q, k, v, causal), "forward", q, k, causal, self.per_pair)

    def attend_backward(self, gradient, q, k, v, out, lse, causal):
        compute = partial(super().attend_backward, gradient, q, k, v, out, lse, causal)
        return self.block(compute, "backward", q, k, causal, BACKWARD * self.per_pair)

    def block(self, compute: Callable, name: str, q, k, causal: bool, seconds: float) -> tuple:
        start = time.perf_counter()
        rows, columns = q.shape[2], k.shape[2]
        pairs = rows * (rows + 1) // 2 if causal else rows * columns
        number, self.count[name] = self.count[name] % RANKS, self.count[name] + 1
        with self.tracer.phase(name, micro_batch=number) if self.tracer else nullcontext():
            result = compute()
            time.sleep(max(0.0, start + seconds * pairs * q.shape[1] - time.perf_counter()))
        return result


def measure(trace: Trace, phase: str) -> tuple[float, float]:
    """Seconds that a rank was blocked in a phase of the quietest step, and seconds of the phase: means over ranks."""
    step, blocked, whole = quietest(trace).step, 0.0, 0.0
    for rank in trace.ranks:
        spans = [span for span in trace.spans[rank] if span["args"]["step"] == step]
        (outer,) = [each for each in spans if each["name"] == phase and "micro_batch" not in each["args"]]
        end = outer["ts"] + outer["dur"]
        whole += outer["dur"]
        blocked += sum(
            each["dur"] for each in spans if each["cat"] in ("wait", "issue") and outer["ts"] <= each["ts"] < end
        )
    return 1e-6 * blocked / len(trace.ranks), 1e-6 * whole / len(trace.ranks)


def labels(mode: str) -> dict[str, list[str]]:
    """What travels in each phase, in the order in which it is sent: a hop's K and V behind the previous one's sums."""
    keys, sums = ["K", "V"], ["dK", "dV"]
    if mode == "allgather":
        return {"forward": keys, "backward": keys + sums}
    between = RANKS - 2  # hops of the ring that send both
    return {"forward": keys * (RANKS - 1), "backward": keys + (sums + keys) * between + sums * 2}


def of_rank_0(trace: Trace, mode: str) -> Trace:
    """Rank 0's quietest step, as step 0, of its messages only the sends, with labels. All ranks do the same.

    The messages of a batch complete together; they are drawn as they follow each other on the simulated link.
    """
    step, free, spans = quietest(trace).step, 0.0, []
    bandwidth, words = TrainConfig(link=link_flag(DRAWN)).link_model.bandwidth, labels(mode)
    for span in trace.spans[0]:
        arguments = span["args"] | {"step": 0, "group": "link"}
        if span["args"]["step"] != step or arguments.get("op") == "receive":  # at the same time as the send
            continue
        if span["cat"] == "communication":
            arguments["label"] = words[arguments["phase"]].pop(0)
        if arguments.pop("peer", None) is not None:
            start = max(free, arguments["issue_us"])
            free = start + 1e6 * arguments["bytes"] / bandwidth
            span = span | {"ts": start, "dur": free - start}
        spans.append(span | {"args": arguments})
    if any(words.values()):
        raise AssertionError(f"labels without a message: {words}")
    return Trace({0: spans}, trace.steps, trace.degrees)


# ---- predicted -------------------------------------------------------------------------------------------------------


def play(mode: str, share: float) -> dict[str, tuple[float, float]]:
    """The alpha-beta model of one layer: by phase, seconds that a rank is blocked, and seconds of the phase."""
    link, size, result = TrainConfig(link=link_flag(share)).link_model, part_bytes(), {}
    model = TrainConfig(**FLAGS).model_config
    for phase, times in (("forward", 1.0), ("backward", BACKWARD)):
        player = Player(RANKS, link)
        cost.play_layer(
            mode, phase, player, [times * hop for hop in hops(HOP)], size, size, model.heads / model.kv_heads
        )
        result[phase] = player.blocked, player.now
    return result
