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
from common.errors import UsageError
from common.experiments.tcp_bytes import PACKET
from common.labs.design import Design, Judged, whole
from common.labs.find import ROOT
from common.launching.command_line import parse
from common.process_groups import DIMENSION_OF
from step08_5d import config as step08
from step08_5d.cost import Layout, bubble, messages, operations

NODES = RANKS = 2
SECONDS = 50  # that a measurement may take
SEQUENCES = 8
ORDERS = ("tp,cp,pp,dp", "tp,cp,dp,pp")


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
    model = parse(8, case.flags.split()).model_config
    compute = sum(operations(model, layout).values()) / case.gflops / 1e9
    share, exposed = bubble(layout), 0.0
    for message in messages(model, layout):
        dimension = DIMENSION_OF[message.group]
        far = sum(crossing(message.op, message.bytes, ranks) for ranks in groups(layout, order)[dimension])
        seconds = message.count * far * PACKET / (case.mbit * 1e6 / 8)
        if dimension == "pp":
            seconds /= layout.micro_batches  # of the others, one travels while the next is computed
        hidden = 2 / 3 * compute / layout.micro_batches if dimension == "dp" else 0.0
        exposed += max(0.0, seconds - hidden)
    return Seconds(compute, compute * share / (1 - share), exposed)


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
    return f"{', '.join(degrees)}, {layout.micro_batches} x {layout.micro_batch}, {order}"


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
    mine, best = predict(case, layout, answers["order"]), predict(case, *best_of(case))
    where = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in mine._asdict().items())
    tokens = SEQUENCES * case.seq
    speeds = tokens / mine.step, tokens / best.step
    found = measure(case, words)
    lines = (f"a step: {where}",)
    if isinstance(found, str):
        return Judged(named(layout, answers["order"]), *speeds, (f"not measured: {found}", *lines))
    return Judged(named(layout, answers["order"]), *speeds, lines, found)


def given(student: int) -> str:
    case = CASES[student % len(CASES)]
    return (
        f"Two nodes of two ranks, joined by a cable of {case.mbit} Mbit/s in each direction. A rank's products run at\n"
        f"{case.gflops:g} GFLOP/s (simulated); within a node, messages take no time worth counting.\n"
        f"Four layers of width {case.hidden}, MLPs of {2 * case.hidden}, 256 tokens in the vocabulary, float32;\n"
        f"{SEQUENCES} sequences of {case.seq} tokens per step.\n"
        f"order: which ranks are neighbours, from near to far: {' or '.join(ORDERS)}."
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
bubble, and what can hide. Passed with 98 % of the predicted speed of the best layout.

*Before:* lesson 8, "When to use it".
""",
        hints=(
            "What does each dimension send over the cable in a step, if its group reaches across: gradients, "
            "activations of every layer, or activations at one border?",
            "Which dimension should stay inside a node? (`order` and the degrees decide.) How much of the rest hides?",
            "Calculate three candidates: dp across with tp inside, pp across with tp inside, pp across with dp "
            "inside; then choose the micro-batch: small for the bubble.",
        ),
        given=given,
        fields={"dp": "1", "tp": "4", "pp": "1", "micro_batch": "8", "order": "tp,cp,pp,dp"},
        judge=judge,
        reveal=reveal,
        variants=len(CASES),
    )
]
