"""What `plan` would have run where others have published what they did: `published --advice`. It takes minutes."""

from dataclasses import replace
from typing import NamedTuple

from common.drawing.tables import print_table
from common.model_config import ModelConfig
from common.presets import PRESETS
from step08_5d.planning.explain import Range
from step08_5d.planning.memory.peak import memory
from step08_5d.planning.published.others import DESCRIBED, OtherRun, read_runs
from step08_5d.planning.search import MOST_FULL, Candidate, Task, named, plans
from step08_5d.planning.time.machines import MACHINES
from step08_5d.planning.time.profiles import RANGE
from step08_5d.planning.time.speed import times


class Situation(NamedTuple):
    """A model on a cluster, and the run that is compared: the fastest of this model that other_runs.csv has nearby."""

    words: str
    gpus: int
    run: str  # its id; its model, length and sequences per GPU are those of the case
    gpu: str = "H100"
    shape: ModelConfig | None = None  # the model itself, where other_runs.csv has one that is near it


CASES = (
    Situation("8B", 8, "nemo-8b-8"),
    Situation("8B", 64, "nemo-8b-128"),
    Situation("8B", 512, "nemo-8b-128"),
    Situation("70B", 64, "maxtext-70b-64"),
    Situation("70B", 256, "nemo-70b-256"),
    Situation("70B", 512, "nemo-70b-2048"),
    Situation("405B", 8192, "meta-405b-8192-cp1"),
    Situation("405B", 16384, "meta-405b-16384-cp1"),
    Situation("Mixtral 8x22B", 64, "fold-8x22b-128-256"),
    Situation("Mixtral 8x22B", 128, "fold-8x22b-128-256"),
    Situation("DeepSeek-V3", 2048, "deepseek-v3-paper", "H800", replace(PRESETS["deepseek-v3"], mtp=1)),
)


class Advice(NamedTuple):
    """What the planner says of a case."""

    model: ModelConfig
    plan: Candidate
    run: OtherRun
    theirs: float | None  # their layout's time over ours, by their profile; None: it has another number of GPUs
    needs: float  # bytes of theirs by our formula


def advise(case: Situation) -> Advice:
    """Plan a case as `plan` does; with interleaved stages where they had them."""
    run = next(each for each in read_runs() if each.id == case.run)
    layout, machine, model = run.layout, MACHINES[case.gpu], case.shape or run.model
    gpus = layout.copies * layout.tp * layout.pp
    sequences = layout.dp * layout.micro_batch * layout.micro_batches * case.gpus // gpus
    task = Task(case.words, model, case.gpus, layout.seq, sequences, machine, layout.stages > 1)
    plan, profile = plans(task)[0][0], DESCRIBED[run.profile]
    theirs = None
    if gpus == case.gpus:
        ours = times(model, plan.layout, machine, profile).step
        theirs = times(model, layout, machine, profile).step / ours
    return Advice(model, plan, run, theirs, sum(memory(model, layout).values()))


def print_advice(cases: tuple[Situation, ...] = CASES) -> None:
    """A table of the cases: our layout with its range, what they ran and reached, and by how much ours is slower."""
    rows = []
    for case in cases:
        model, plan, run, theirs, needs = advise(case)
        machine = MACHINES[case.gpu]
        span, layout = Range.of(model, plan.layout, machine, RANGE), run.layout
        gpus = layout.copies * layout.tp * layout.pp
        where = "" if gpus == case.gpus else f" on {gpus:,}"
        fits = "" if needs <= MOST_FULL * machine.memory else f" ({needs / 1e9:.0f} GB by our formula)"
        words = "" if theirs is None else f"{1 / theirs - 1:+.0%}"
        ours = (named(plan.layout), span.mfu, f"{plan.regret:+.0%}")
        rows.append((f"{case.words} on {case.gpus:,}", *ours, named(layout) + where + fits, f"{run.mfu:.0%}", words))
    header = ("", "plan", "MFU, predicted", "at worst", "they ran", "MFU, published", "ours takes longer by")
    print_table("advice beside what others ran; the last column is predicted, by their profile", header, rows)
