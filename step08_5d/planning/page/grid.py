"""All layouts of a task in words, a line for each: what the page looks up when a slider moves.

The page shows these words as they are. It computes none of them, and has no formula.
"""

from collections import Counter
from decimal import Decimal
from typing import NamedTuple

from tqdm import tqdm

from common.costs.vocabulary import KINDS
from step08_5d.cost import Layout
from step08_5d.planning.explain import divided, most_of_the_rest, winners
from step08_5d.planning.memory.backwards import fullest_ranks
from step08_5d.planning.memory.peak import peak
from step08_5d.planning.search import MOST_FULL, Candidate, Task, layouts, plans
from step08_5d.planning.time.profiles import Profile
from step08_5d.planning.time.speed import Times, mfu, times

MOST = 6_400  # layouts, of 230 to 280 characters each: so the page has about 2 MB at most
CHOICES = {"dp": "Data (dp)", "tp": "Tensor (tp)", "pp": "Pipeline (pp)", "cp": "Context (cp)", "ep": "Expert (ep)"}
CHOICES |= {
    "zero": "ZeRO stage",
    "zero_replicas": "ZeRO copies",
    "micro_batch": "Micro-batch",
    "recompute": "Recompute",
}
RECOMPUTE = ("none", "selective", "full")
FIRST = ord("0")  # the character of a choice's first stop; the next one stands for the second
# The words of a line: those of the layout, of each end of the range, and of each stage that may be fullest
OF_LAYOUT = ("stops", "micro_batches", "fits", "held", "regret")
OF_END = ("step", "mfu", "speed", "binds", *Times._fields)
OF_STAGE = ("stage", "all", *KINDS, "communication", "activations", "working")


class Grid(NamedTuple):
    """Lines, and what their words mean."""

    stops: dict[str, list]  # the values of each choice
    lines: list[str]  # the layout of least regret first; those that do not fit last
    considered: int  # layouts, by the planner
    binds: list[str]  # texts that lines have as numbers
    pipelines: dict[int, str]  # by pp: how layers are divided
    picks: dict[str, int]  # lines that `plan` would name
    best: Layout  # the first of them


def make_grid(task: Task, ends: tuple[Profile, ...]) -> Grid:
    """Return the grid of a task, with as many layouts as have room. Raises UsageError if none fits a GPU."""
    fitting, _ = plans(task)
    regrets = {plan.layout: f"{plan.regret:+.0%}" for plan in fitting}
    considered = list(dict.fromkeys([*layouts(task), *regrets]))
    ranked = [*regrets, *(each for each in considered if each not in regrets)]
    picks, binds, written = picked(fitting), {}, {}
    shown = dict.fromkeys([*picks.values(), *in_turn(ranked)][:MOST])
    # In the order of the search, as what one layout has in common with the next is computed once
    for layout in tqdm([each for each in considered if each in shown], unit=" layouts", disable=None):
        written[layout] = words_of(task, layout, ends, regrets.get(layout, "-"), binds)
    shown = [each for each in ranked if each in shown]
    stops = stops_of(shown)
    lines = [" ".join((code(each, stops), *written[each])) for each in shown]
    pipelines = {each.pp: divided(task, each) for each in shown if each.pp > 1}
    picks = {name: shown.index(layout) for name, layout in picks.items()}
    return Grid(stops, lines, len(ranked), list(binds), pipelines, picks, shown[0])


def picked(fitting: list[Candidate]) -> dict[str, Layout]:
    """Return the layouts that `plan` names first."""
    found = winners(fitting)
    if len(found) > 1:
        found = {"least regret": fitting[0]} | found
    return {name: plan.layout for name, plan in found.items()}


def in_turn(ranked: list[Layout]) -> list[Layout]:
    """Return the first of each set of degrees, then the second of each, and so on."""
    seen, turns = Counter(), {}
    for layout in ranked:
        degrees = layout.dp, layout.tp, layout.pp, layout.cp, layout.ep
        seen[degrees] += 1
        turns[layout] = seen[degrees]
    return sorted(ranked, key=turns.get)


def stops_of(shown: list[Layout]) -> dict[str, list]:
    """Return the values of each choice, in order."""
    found = {name: sorted({getattr(each, name) for each in shown}) for name in CHOICES}
    return found | {"recompute": sorted(found["recompute"], key=RECOMPUTE.index)}


def code(layout: Layout, stops: dict[str, list]) -> str:
    """Return a character for the stop of each choice."""
    return "".join(chr(FIRST + some.index(getattr(layout, name))) for name, some in stops.items())


# ---- words -----------------------------------------------------------------------------------------------------------


def digits(number: float) -> str:
    """Three significant digits, without an exponent."""
    return format(Decimal(f"{number:.2e}"), "f") if number else "0"


def words_of(task: Task, layout: Layout, ends: tuple[Profile, ...], regret: str, binds: dict[str, int]) -> list[str]:
    """Return all words of a line but its stops. binds: the number of each text, to which new ones are added."""
    ranks, memory = fullest_ranks(task.model, layout), task.machine.memory
    stages = {rank: peak(task.model, layout, rank).held for rank in ranks}
    fullest = max(sum(held.values()) for held in stages.values())
    fits = "good" if fullest <= MOST_FULL * memory else "tight" if fullest <= memory else "bad"
    words = [str(layout.micro_batches), fits, digits(fullest / 1e9), regret]
    for profile in ends:
        found = times(task.model, layout, task.machine, profile)
        tokens = layout.tokens_per_gpu / found.step
        share = mfu(task.model, layout, found.step, task.machine)
        waits = binds.setdefault(most_of_the_rest(found), len(binds))
        words += [digits(found.step), f"{share:.1%}", f"{tokens:,.0f}", str(waits), *map(digits, found)]
    for rank, held in stages.items():
        words += [str(rank), *(digits(size / 1e9) for size in (sum(held.values()), *held.values()))]
    return words
