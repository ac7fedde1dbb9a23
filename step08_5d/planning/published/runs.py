"""The playbook's own runs: a model of time is fitted to some of them and judged on the others.

playbook_runs.csv holds 1,541 of the runs behind *The Ultra-Scale Playbook* (Hugging Face, 2025), section
"Benchmarking thousands of configurations": 13 pairs of a model and a number of nodes of eight H100, all with sequences
of 4,096 tokens. A row without numbers is a run that crashed or ran out of memory. Nine rows contradict themselves:
their micro-batches and data-parallel ranks do not make up the batch. They are left out, since nobody knows what ran.
"""

import csv
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common.counts import count_parameters
from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.planning.fitting import descend, spearman
from step08_5d.planning.time.machines import MACHINES
from step08_5d.planning.time.nanotron import PAUSE, NanotronTerms, lateness
from step08_5d.planning.time.profiles import PROFILES, Profile
from step08_5d.planning.time.speed import times

FILE = Path(__file__).with_name("playbook_runs.csv")
SEQ, VOCAB = 4096, 131072
SHAPES = {  # hidden, layers, heads, ffn; with one stage the two small ones share embedding and head
    "1B": (2048, 16, 32, 8192),
    "3B": (3072, 28, 24, 8192),
    "8B": (4096, 32, 32, 14336),
    "80B": (8192, 80, 64, 28672),
}
H100 = MACHINES["H100"]
WITHOUT_PIPELINES, OF_PIPELINES = ("products", "launch", "far_start"), ("paced",)
MOST = 5  # a run that is further off counts no more than this factor
TELLABLE = 1.5  # whether a run was late can be told if that makes this factor


class PublishedRun(NamedTuple):
    """One published run."""

    name: str
    nodes: int
    model: ModelConfig
    layout: Layout
    mfu: float | None  # None: it crashed or ran out of memory
    tokens_per_second: float  # of a GPU
    memory: float  # bytes

    @property
    def pair(self) -> tuple[str, int]:
        return self.name, self.nodes


def read_runs() -> list[PublishedRun]:
    """Return all published runs whose columns agree with each other."""
    result = []
    for row in csv.DictReader(FILE.open(encoding="utf-8")):
        dp, pp, tp, zero = (int(row[key]) for key in ("dp", "pp", "tp", "zero"))
        if dp * int(row["mbs"]) * int(row["accumulation"]) != int(row["gbs"]):
            continue
        hidden, layers, heads, ffn = SHAPES[row["model"]]
        tied = row["model"] in ("1B", "3B") and pp == 1
        layout = Layout(SEQ, dp, pp, tp=tp, zero=zero, micro_batch=int(row["mbs"]), dtype="bfloat16", nanotron=True)
        result.append(
            PublishedRun(
                row["model"],
                int(row["nodes"]),
                ModelConfig(VOCAB, hidden, layers, heads, heads, ffn, tied),
                layout._replace(micro_batches=int(row["accumulation"])),
                float(row["mfu_percent"]) / 100 if row["mfu_percent"] != "nan" else None,
                float(row["tokens_per_s_per_gpu"]),
                float(row["memory_gb"]) * 1e9,
            )
        )
    return result


class Habits(NamedTuple):
    """The numbers of nanotron's profile that a fit looks for, and where it begins."""

    products: float = 0.6
    launch: float = 1e-3
    far_start: float = 1e-3
    paced: float = 5e-3

    @property
    def profile(self) -> Profile:
        own = NanotronTerms(self.launch, self.far_start, self.paced)
        return PROFILES["nanotron"]._replace(products=self.products, own=own)


# ---- what a run should have reached ----------------------------------------------------------------------------------


def mfu(run: PublishedRun, tokens_per_second: float) -> float:
    """The published kind of MFU: 6 FLOPs a token for each parameter, embedding included, and 12 L h s for attention's
    full square."""
    model = run.model
    flops = 6 * count_parameters(model).total + 12 * model.layers * model.hidden * SEQ
    return tokens_per_second * flops / H100.peak


class Guess(NamedTuple):
    """The MFU that the model of time predicts."""

    well: float
    late: float  # if every message between stages is late by PAUSE

    @property
    def can_tell(self) -> bool:
        """Whether one can tell from a run which of them it was."""
        return self.well > TELLABLE * self.late


def guess(run: PublishedRun, profile: Profile) -> Guess:
    layout, step = run.layout, times(run.model, run.layout, H100, profile).step
    return Guess(*(mfu(run, layout.tokens_per_gpu / (step + more)) for more in (0.0, lateness(layout, PAUSE))))


def off(value: float, run: PublishedRun) -> float:
    """How far a predicted MFU is from the published one, as |log| of their ratio."""
    return abs(math.log(value / run.mfu))


def was_late(run: PublishedRun, profile: Profile) -> bool:
    """Whether a run was as slow as one whose messages are late."""
    both = guess(run, profile)
    return both.can_tell and off(both.late, run) < off(both.well, run)


# ---- a fit by coordinate descent -------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """What some runs show."""

    profile: Profile = PROFILES["nanotron"]
    risk: float = 0.014  # probability of a pipeline to be late, per node


def error(habits: Habits, runs: list[PublishedRun]) -> float:
    """Mean of |log(predicted / published)| of the MFU of runs that have one, each by the better of its guesses."""
    guesses = ((guess(run, habits.profile), run) for run in runs)
    return statistics.mean(min(*(off(each, run) for each in both), math.log(MOST)) for both, run in guesses)


def fitted(runs: list[PublishedRun]) -> Fit:
    """The habits of runs without a pipeline first, then what a pipeline adds, and how many of them are late."""
    habits, (whole, divided) = Habits(), ([run for run in runs if run.mfu and (run.layout.pp > 1) == i] for i in (0, 1))
    for names, some in ((WITHOUT_PIPELINES, whole), (OF_PIPELINES, divided)):
        habits = descend(habits, names, partial(error, runs=some))
    profile, nodes = habits.profile, sum(run.nodes for run in divided)
    return Fit(profile, sum(was_late(run, profile) for run in divided) / nodes)


def predicted(run: PublishedRun, fit: Fit) -> float:
    """The MFU to expect, as we cannot know whether a pipeline is late."""
    both, risk = guess(run, fit.profile), min(1.0, fit.risk * run.nodes)
    return (1 - risk) * both.well + risk * both.late


def halves(runs: list[PublishedRun]) -> list[tuple[list[PublishedRun], list[PublishedRun]]]:
    """Every second pair of model and nodes to fit to, the others to judge on; and the other way round."""
    pairs = sorted({run.pair for run in runs})
    even, odd = ([run for run in runs if pairs.index(run.pair) % 2 == part] for part in (0, 1))
    return [(even, odd), (odd, even)]


# ---- judged ----------------------------------------------------------------------------------------------------------


class Ranking(NamedTuple):
    """How well predictions rank runs."""

    spearman: float  # over all runs
    within: dict[tuple, float]  # over those of a pair
    chosen: dict[tuple, PublishedRun]  # which run the model likes best
    gain: dict[tuple, float]  # its MFU, over the best of its pair


def judge(
    runs: list[PublishedRun],
    predict: Callable[[PublishedRun], float],
    published: Callable[[PublishedRun], float] = lambda run: run.mfu,
    fits: Callable[[PublishedRun], bool] = lambda run: True,
) -> Ranking:
    """Compare predictions with what was published of the runs that ended; choose among those that fit, if any does."""
    runs = [run for run in runs if run.mfu]
    found = {run: (predict(run), published(run)) for run in runs}
    within, chosen, gain = {}, {}, {}
    for pair in sorted({run.pair for run in runs}):
        of_pair = {run: both for run, both in found.items() if run.pair == pair}
        within[pair] = spearman(*zip(*of_pair.values()))
        candidates = list(filter(fits, of_pair)) or list(of_pair)
        chosen[pair] = max(candidates, key=lambda run: of_pair[run][0])
        gain[pair] = found[chosen[pair]][1] / max(theirs for _, theirs in of_pair.values())
    return Ranking(spearman(*zip(*found.values())), within, chosen, gain)
