"""Design in step 8: the fastest plan for a model on given GPUs, by the planner's prediction."""

import functools
from dataclasses import replace

from common.errors import UsageError
from common.labs.design import Design, Judged, whole
from common.labs.lab import wrapped
from common.presets import resolve
from step08_5d.cost import Layout
from step08_5d.labs.plan_accounts import accounts
from step08_5d.planning.memory.peak import memory
from step08_5d.planning.search import MOST_FULL, Candidate, Task, flags, named, plans
from step08_5d.planning.time.machines import MACHINES
from step08_5d.planning.time.profiles import PROFILES
from step08_5d.planning.time.speed import times

CASES = (  # model, GPUs, kind, sequences of a batch, tokens in each
    ("llama3-8b", 64, "A100", 128, 8192),
    ("llama3-70b", 128, "H100", 128, 8192),
    ("llama3-8b", 32, "H100", 64, 16384),
    ("llama3-70b", 64, "H200", 128, 4096),
)
DEGREES = ("dp", "tp", "pp", "cp")
PROFILE = PROFILES["megatron"]


def task_of(student: int) -> Task:
    name, gpus, kind, sequences, seq = CASES[student % len(CASES)]
    model = resolve(name)
    model = replace(model, max_positions=max(model.max_positions, seq))
    return Task(name, model, gpus, seq, sequences, MACHINES[kind], profiles=(PROFILE,))


def speed(task: Task, step: float) -> float:
    """Tokens per second of a step of so many seconds."""
    return task.sequences * task.seq / step


@functools.cache
def best_of(student: int) -> Candidate:
    return plans(task_of(student))[0][0]


def given(student: int) -> str:
    task = task_of(student)
    machine = task.machine
    return (
        f"{task.name} on {task.gpus} {machine.name}s, {machine.gpus} in a node.\n"
        f"Each has {machine.memory / 1e9:.0f} GB, of which {MOST_FULL:.0%} may be filled.\n"
        f"{task.sequences} sequences of {task.seq} tokens per step, bfloat16.\n"
        f"Times are of the planner's profile {PROFILE.name}, in step08_5d/planning/time/profiles.py: products reach\n"
        f"{PROFILE.products:.0%} of the {machine.products / 1e12:.0f} TFLOP/s of a lone one, and messages "
        f"{PROFILE.network:.0%} of a GPU's {machine.near / 1e9:g} GB/s in a node\n"
        f"and {machine.far / 1e9:g} GB/s between nodes. Of a message, {PROFILE.hides:.0%} hide, if what may run "
        "meanwhile takes long enough.\n"
        f"dp x tp x pp x cp is {task.gpus}. zero: 0 to 3; recompute: none, selective or full; micro_batch: sequences."
    )


def layout_of(answers: dict[str, str], task: Task) -> Layout:
    """The layout that was answered. Raises UsageError where its parts do not fit together."""
    degrees = {name: whole(answers, name) for name in DEGREES}
    size, zero, recompute = whole(answers, "micro_batch"), answers["zero"], answers["recompute"]
    if zero not in ("0", "1", "2", "3") or recompute not in ("none", "selective", "full"):
        raise UsageError(f"zero = {zero}, recompute = {recompute}: 0 to 3; none, selective or full")
    layout = Layout(task.seq, **degrees, zero=int(zero), micro_batch=size, dtype="bfloat16", recompute=recompute)
    product = layout.dp * layout.tp * layout.pp * layout.cp
    if product != task.gpus:
        raise UsageError(f"dp x tp x pp x cp is {product}, and there are {task.gpus} GPUs")
    if task.sequences % (layout.dp * size):
        raise UsageError(
            f"{task.sequences} sequences cannot be divided by dp x micro_batch, which is {layout.dp * size}"
        )
    flags(task, layout)  # which raises UsageError where step 8 would
    return layout._replace(micro_batches=task.sequences // layout.dp // size)


def judge(answers: dict[str, str], student: int) -> Judged:
    task = task_of(student)
    layout = layout_of(answers, task)
    held, room = memory(task.model, layout), task.machine.memory * MOST_FULL
    if (needed := sum(held.values())) > room:
        largest = max(held, key=held.get)
        raise UsageError(
            f"{named(layout)} needs {needed / 1e9:.0f} GB per GPU, and {room / 1e9:.0f} may be filled; most of it is "
            f"{largest} ({held[largest] / 1e9:.0f} GB)"
        )
    found = times(task.model, layout, task.machine, PROFILE)
    parts = sorted(found._asdict().items(), key=lambda item: -item[1])
    where = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts if seconds > 0.01 * found.step)
    lines = (f"a step takes {found.step:.2f} s: {where}", f"memory: {needed / 1e9:.0f} of {room / 1e9:.0f} GB")
    legend = f"({layout.micro_batches} x {layout.micro_batch}: micro-batches of a rank x sequences in each)"
    more = [part for line in accounts(task, layout, PROFILE) for part in wrapped(line, "  ", 116).splitlines()]
    return Judged(named(layout), speed(task, found.step), best_speed(student), (legend, *lines, *more))


def best_speed(student: int) -> float:
    """Tokens/s of the best layout that the planner finds."""
    return speed(task_of(student), best_of(student % len(CASES)).seconds[PROFILE.name])


def reveal(student: int) -> str:
    task, plan = task_of(student), best_of(student % len(CASES))
    return (
        f"{named(plan.layout)}: {speed(task, plan.seconds[PROFILE.name]):,.0f} tokens/s (predicted).\n\n"
        f"    python -m step08_5d.planning plan --model {task.name} --gpus {task.gpus} --gpu {task.machine.name} "
        f"--seq-len {task.seq} --tokens-per-batch {task.seq * task.sequences} --profile {PROFILE.name}\n\n"
        "prints it with its neighbours, and says why it wins."
    )


LABS = [
    Design(
        id="design-08-b",
        title="A plan for a cluster",
        minutes=30,
        task="""\
Which layout trains this model fastest on these GPUs? `answer.toml` says which GPUs, and begins with a layout that fits,
but is slow. `check` says whether yours fits, what a step takes and what for (*predicted*, by the planner of step 8),
and keeps a score board.

*Graded:* 0.9 times your share of the speed of the best layout that the planner finds; 98 % of it pass.

*Before:* lesson 8 and `step08_5d/planning/README.md`. Calculate first, with the numbers of the profile that is named
there; `check` shows how each part of the seconds comes about. The planner itself is the solution.
""",
        hints=(
            "Start from memory: weights, gradients and Adam's state, divided by whom? Then activations: of how many "
            "tokens?",
            "What does the line of seconds say is largest beside the computation? Which dimension sends less, or to "
            "nearer GPUs?",
            "Full recomputation buys memory with a third more work: look for plans without it. The smaller model has "
            "no pipeline, but ZeRO over all that is left by tensor or context parallelism of 2, or over all GPUs; the "
            "larger one tensor and context parallelism within a node, a short pipeline across nodes, and ZeRO-1 over "
            "the rest.",
        ),
        given=given,
        fields={"dp": "1", "tp": "8", "pp": "8", "cp": "1", "zero": "0", "recompute": "full", "micro_batch": "1"},
        judge=judge,
        reveal=reveal,
        variants=len(CASES),
        best=best_speed,
        begins=lambda student: {"pp": str(task_of(student).gpus // 8)},
    )
]
