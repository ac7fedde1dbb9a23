"""Design in step 8: two nodes of two ranks, and a slow cable between them."""

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from common.compare import read_run
from common.config import spelled
from common.counts import count_parameters
from common.errors import UsageError
from common.experiments.tcp_bytes import PACKET
from common.labs.design import Design, Judged, whole
from common.labs.find import ROOT
from common.labs.lab import wrapped
from common.launching.command_line import parse
from common.process_groups import DIMENSION_OF
from step08_5d import config as step08
from step08_5d.cost import Layout, bubble, messages, operations

NODES = RANKS = 2
SECONDS = 50  # that a measurement may take
SEQUENCES = 8
ORDERS = ("tp,cp,pp,dp", "tp,cp,dp,pp")
FAR = 0.1  # by so much, relative, a measured step is longer than a predicted one, before a sentence says why
REST = (
    "The prediction is of the given hardware, where products and the cable alone take time. The measurement runs on "
    "this machine's cores, four processes at once, where all else takes time, too: norms, optimizer, Python, messages."
)


class Case(NamedTuple):
    """What a student gets."""

    mbit: int  # of the cable, per second and direction
    gflops: float  # of a rank's products, simulated
    hidden: int
    seq: int

    @property
    def flags(self) -> str:
        return (
            f"--layers 4 --hidden {self.hidden} --heads 4 --kv-heads 4 --ffn {2 * self.hidden} --vocab 256 --seq-len "
            f"{self.seq} --global-batch {SEQUENCES} --data synthetic --device cpu --compute {self.gflops:g} --steps 2"
        )


CASES = Case(10, 0.25, 128, 64), Case(20, 0.25, 128, 64), Case(4, 0.5, 64, 256), Case(8, 0.25, 96, 128)


class Seconds(NamedTuple):
    """Of a step, predicted."""

    compute: float
    bubble: float
    cable: float  # that nothing hides

    @property
    def step(self) -> float:
        return sum(self)


def groups(layout: Layout, order: str) -> dict[str, list[list[int]]]:
    """The ranks of each group of each dimension, if degrees are laid over ranks in this order, from near to far."""
    names = order.split(",")
    sizes = [getattr(layout, name) for name in names]
    places = [place[::-1] for place in itertools.product(*(range(size) for size in reversed(sizes)))]  # by rank
    found = {}
    for axis, name in enumerate(names):
        alike: dict[tuple, list[int]] = {}
        for rank, place in enumerate(places):
            alike.setdefault((*place[:axis], *place[axis + 1 :]), []).append(rank)
        found[name] = list(alike.values())
    return found


def crossing(op: str, size: float, ranks: list[int]) -> float:
    """Bytes over the cable, from the first node, if every rank of a group sends `size`: rings, or all to all others."""
    nodes = [rank // RANKS for rank in ranks]
    here = nodes.count(0)
    if here in (0, len(nodes)):
        return 0.0
    if op == "send":
        return size
    if op == "all_reduce":
        return size * sum(a == 0 != b for a, b in zip(nodes, nodes[1:] + nodes[:1]))
    return size * here * (len(nodes) - here) / (len(nodes) - 1)


def predict(case: Case, layout: Layout, order: str) -> Seconds:
    """Products at the simulated rate, the bubble, and the cable. Sums of gradients hide behind the last backward."""
    compute, share = computed(case, layout), bubble(layout)
    exposed = sum(max(0.0, each.seconds - each.hidden) for each in over_cable(case, layout, order).values())
    return Seconds(compute, compute * share / (1 - share), exposed)


def computed(case: Case, layout: Layout) -> float:
    """Seconds of a rank's products in a step."""
    return sum(operations(parse(8, case.flags.split()).model_config, layout).values()) / case.gflops / 1e9


class Traffic(NamedTuple):
    """Of a dimension that reaches across, in a step: what the cable carries while nothing else is done."""

    bytes: float  # of tensors, from the first node
    seconds: float
    hidden: float = 0.0  # of these


def over_cable(case: Case, layout: Layout, order: str) -> dict[str, Traffic]:
    """By dimension. A pipeline waits for one micro-batch's activations and their gradient: others travel meanwhile."""
    far = {}
    for message in messages(parse(8, case.flags.split()).model_config, layout):
        dimension = DIMENSION_OF[message.group]
        across = sum(crossing(message.op, message.bytes, ranks) for ranks in groups(layout, order)[dimension])
        if across:
            far[dimension] = far.get(dimension, 0.0) + across * (1 if dimension == "pp" else message.count)
    rate, last = case.mbit * 1e6 / 8, 2 / 3 * computed(case, layout) / layout.micro_batches
    seconds = {dimension: size * PACKET / rate for dimension, size in far.items()}
    return {each: Traffic(far[each], took, min(took, last) * (each == "dp")) for each, took in seconds.items()}


def accounts(case: Case, layout: Layout, order: str) -> list[str]:
    """How the seconds of the cable come about, to be calculated again by hand: lines for each dimension."""
    model = parse(8, case.flags.split()).model_config
    stream = f"{layout.micro_batch} x {case.seq} x {case.hidden} activations of 4 bytes"
    lines = []
    for dimension, found in over_cable(case, layout, order).items():
        across = sum(len({rank // RANKS for rank in ranks}) > 1 for ranks in groups(layout, order)[dimension])
        if dimension == "dp":
            count = count_parameters(model).total / layout.tp / layout.pp
            what = f"2(N-1)/N of about {count:,.0f} gradients of 4 bytes, N = {layout.dp}"
        elif dimension == "pp":
            what = f"{stream} there and as many gradients back, of one micro-batch (others travel meanwhile)"
        else:
            times = 10 * model.layers + 4  # a sublayer has three gathers and two scatters, an end has half of that
            what = (
                f"{stream}, {times} times per micro-batch (5 around each attention and each MLP, 4 at the ends), for "
            )
            what += f"{layout.micro_batches} micro-batches, and some small sums. All of it crosses, as both ranks of a "
            what += f"node send their 1/{layout.tp} to both of the other"
        what += f"; {across} groups reach across" if across > 1 else ""
        what += f", each with 1/{layout.tp} of that" if dimension == "pp" and layout.tp > 1 else ""
        rate = f"x {PACKET:.4f} for packets / {case.mbit / 8:g} MB/s = {found.seconds:.2f} s"
        hidden = f", of which {found.hidden:.2f} s hide behind the last backward" if found.hidden else ""
        lines += [f"cable, {dimension}: {found.bytes:,.0f} bytes {rate}{hidden}", *wrapped(what, "  ").splitlines()]
    return lines or ["cable: no dimension reaches across"]


def layouts(case: Case) -> Iterator[tuple[Layout, str]]:
    """All layouts of four ranks."""
    for dp, tp, pp in itertools.product((1, 2, 4), repeat=3):
        for size, order in itertools.product((1, 2, 4, 8), ORDERS):
            if dp * tp * pp == NODES * RANKS and SEQUENCES % (dp * size) == 0:
                counts = {"micro_batch": size, "micro_batches": SEQUENCES // dp // size}
                yield Layout(case.seq, dp=dp, tp=tp, pp=pp, **counts), order


def best_of(case: Case) -> tuple[Layout, str]:
    return min(layouts(case), key=lambda each: predict(case, *each).step)


def named(layout: Layout, order: str) -> str:
    degrees = [f"{name} {size}" for name in ("dp", "tp", "pp") if (size := getattr(layout, name)) > 1]
    many = f"{layout.micro_batches} micro-batch{'es' * (layout.micro_batches > 1)} of {layout.micro_batch}"
    return f"{', '.join(degrees)}, {many}, {order}"


def flags_of(case: Case, layout: Layout, order: str) -> list[str]:
    """The flags of step 8. Raises UsageError where step 8 refuses them."""
    words = case.flags.split()
    for name in ("dp", "tp", "pp", "micro_batch"):
        words += [spelled(name), str(getattr(layout, name))]
    words += ["--order", order]
    config = parse(8, words)
    config.resolve_and_check(NODES * RANKS)
    step08.check(config)
    return words


def measure(case: Case, words: list[str]) -> float | str:
    """Tokens/s of the second step on two such nodes, or why there is no measurement."""
    with tempfile.TemporaryDirectory(prefix="design-") as folder:
        nodes = ["-m", "common.nodes", "--nodes", NODES, "--ranks", RANKS, "--bandwidth", f"{case.mbit}mbit", "--"]
        command = [sys.executable, *nodes, "step08_5d/train.py", *words, "--run-dir", folder, "--peak-tflops", "1"]
        quiet = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": SECONDS}
        quiet["env"] = os.environ | {"PYTHONPATH": str(ROOT)}
        try:
            done = subprocess.run([str(word) for word in command], cwd=ROOT, **quiet)
        except subprocess.TimeoutExpired:
            return f"two steps take longer than {SECONDS} s here"
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["the nodes could not be made"])[-1]
        record = read_run(folder)
        return record.value(1, "tokens_per_s")


def judge(answers: dict[str, str], student: int) -> Judged:
    case = CASES[student % len(CASES)]
    degrees = {name: whole(answers, name) for name in ("dp", "tp", "pp", "micro_batch")}
    if answers["order"] not in ORDERS:
        raise UsageError(f"order = {answers['order']} is none of {' and '.join(ORDERS)}")
    if degrees["dp"] * degrees["tp"] * degrees["pp"] != NODES * RANKS:
        raise UsageError(f"dp x tp x pp must be {NODES * RANKS}")
    if SEQUENCES % (degrees["dp"] * degrees["micro_batch"]):
        raise UsageError(f"{SEQUENCES} sequences cannot be divided by dp x micro_batch")
    layout = Layout(case.seq, **degrees, micro_batches=SEQUENCES // degrees["dp"] // degrees["micro_batch"])
    words = flags_of(case, layout, answers["order"])
    mine = predict(case, layout, answers["order"])
    where = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in mine._asdict().items())
    tokens = SEQUENCES * case.seq
    judged = named(layout, answers["order"]), tokens / mine.step, best_speed(student)
    lines = [f"a step takes {mine.step:.2f} s: {where}", *accounts(case, layout, answers["order"])]
    found = measure(case, words)
    if isinstance(found, str):
        return Judged(*judged, (f"not measured: {found}", *lines))
    if (more := tokens / found - mine.step) > FAR * mine.step:
        took = f"That is {more:.1f} s of the {tokens / found:.1f} s of a measured step."
        lines = [*wrapped(f"{REST} {took}", "  ").splitlines(), *lines]
    return Judged(*judged, tuple(lines), found)


def best_speed(student: int) -> float:
    """Tokens/s of the best layout, predicted."""
    case = CASES[student % len(CASES)]
    return SEQUENCES * case.seq / predict(case, *best_of(case)).step


def given(student: int) -> str:
    case = CASES[student % len(CASES)]
    return (
        f"Two nodes of two ranks, joined by a cable of {case.mbit} Mbit/s in each direction. A rank's products run at\n"
        f"{case.gflops:g} GFLOP/s (simulated); within a node, messages take no time worth counting.\n"
        f"Four layers of width {case.hidden}, MLPs of {2 * case.hidden}, 256 tokens in the vocabulary, float32;\n"
        f"{SEQUENCES} sequences of {case.seq} tokens per step. micro_batch: sequences in each; dp x tp x pp is 4.\n"
        f"order: {' or '.join(ORDERS)} (cp is 1). Ranks 0 and 1 are the first node. The first dimension with\n"
        'more than one rank has neighbours there: if dp and pp are 2, order = "tp,cp,dp,pp" keeps dp inside a node.'
    )


def reveal(student: int) -> str:
    case = CASES[student % len(CASES)]
    rows = {}
    for each in layouts(case):
        rows.setdefault(named(*each), predict(case, *each))
    best = sorted(rows.items(), key=lambda item: item[1].step)
    lines = [
        f"{SEQUENCES * case.seq / took.step:>8,.0f} tokens/s  {took.step:.2f} s, cable {took.cable:.2f}  {name}"
        for name, took in best
    ]
    return "\n".join(["All layouts, predicted, the fastest first:", *lines, "", f"    {command(case)}"])


def command(case: Case) -> str:
    words = " ".join(flags_of(case, *best_of(case)))
    return f"python -m common.nodes --nodes 2 --ranks 2 --bandwidth {case.mbit}mbit -- step08_5d/train.py {words}"


LABS = [
    Design(
        id="design-08-a",
        title="Two nodes and a slow cable",
        minutes=30,
        task="""\
Two nodes of two ranks each, joined by a slow cable: which layout trains the most tokens per second? `answer.toml` has
the hardware, the model, and a layout to begin with.

`check` predicts your step (products at the given rate, the pipeline's bubble, and the bytes over the cable; sums of
gradients hide behind the last micro-batch's backward), and keeps a score board. Where Linux lets it make network
namespaces, it also measures your layout on two such nodes, as `python -m common.nodes` does. `micro_batch` changes the
bubble, and what can hide.

*Graded:* 0.9 times your share of the best layout's predicted speed; 98 % of it pass. What is measured does not count.

*Before:* lesson 8, "When to use it".
""",
        hints=(
            "What does each dimension send over the cable in a step, if its group reaches across: gradients, "
            "activations of every layer, or activations at one border?",
            "Which dimension should stay inside a node? (`order` and the degrees decide.) How much of the rest hides?",
            "Calculate three candidates: dp across with tp inside, pp across with tp inside, pp across with dp "
            "inside. Then choose the micro-batch: small where there is a bubble, large where sums of gradients hide.",
        ),
        given=given,
        fields={"dp": "1", "tp": "4", "pp": "1", "micro_batch": "8", "order": "tp,cp,pp,dp"},
        judge=judge,
        reveal=reveal,
        variants=len(CASES),
        best=best_speed,
    )
]
