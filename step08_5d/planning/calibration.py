"""How long a step takes on the machine at hand: what dry runs count, times a few rates that measured runs show.

The model of `speed.py` is one of GPUs. Ranks on a CPU share its cores, and each small operation and each message costs
as much as a large one. So here a rank's work is what its dry run counts, and a machine is six numbers: seconds for each
FLOP, operation, byte that operations read or write, message and byte sent, and for each message that ranks wait for.
They are fitted to some of a sweep's runs. Whether they are any good, the others say.
"""

import math
import statistics
from typing import NamedTuple

from tqdm import tqdm

from common.process_groups import Degrees
from step08_5d.planning.dry_run import DryRun, configuration, dry_run
from step08_5d.planning.fitting import descend, kendall


class Work(NamedTuple):
    """What a rank does in a step."""

    flops: float
    operations: float
    touched: float  # bytes
    messages: float  # a collective over N ranks counts as N - 1, an all-reduce as twice that
    sent: float  # bytes


class Layout(NamedTuple):
    """What all ranks of a layout do, as far as time depends on it."""

    stages: list[Work]  # of a rank of each pipeline rank
    ranks: int  # that do the same, for each of them
    micro_batches: int
    tokens: int  # of all ranks in a step


class Rates(NamedTuple):
    """Seconds that a core needs for each of a `Work`, and that a rank waits for a message beyond that."""

    flops: float = 2e-11
    operations: float = 1e-5
    touched: float = 1e-10
    messages: float = 1e-4
    sent: float = 1e-9
    waiting: float = 1e-4


def work_of(run: DryRun) -> Work:
    """What a dry run has counted, in numbers of `Work`."""
    degrees = Degrees.of(run.config)
    sizes = {"tp": degrees.tp, "cp": degrees.cp, "ep": degrees.ep, "world": degrees.world, "pp_forward": degrees.pp}
    hops = 0.0
    for (group, op), (number, _) in run.sent.items():
        others = 1 if op == "send" else sizes.get(group, degrees.dp * degrees.cp) - 1
        hops += number * others * (2 if op == "all_reduce" else 1)
    return Work(run.flops, run.operations, run.touched, hops, sum(size for _, size in run.sent.values()))


def layout_of(flags: list[str], world: int) -> Layout:
    """Play a rank of each stage. Raises UsageError as a real run does."""
    config = configuration(flags, world)
    first = _first_ranks(Degrees.of(config))
    works = [work_of(dry_run(config, rank, like_gloo=True)) for rank in first]
    return Layout(works, world // len(first), config.accumulation_steps, config.global_batch * config.seq_len)


def _first_ranks(degrees: Degrees) -> list[int]:
    """The first rank of each pipeline stage."""
    inside = degrees.axes[degrees.axes.index("pp") + 1 :]
    apart = math.prod(getattr(degrees, axis) for axis in inside)
    return [stage * apart for stage in range(degrees.pp)]


def seconds(layout: Layout, rates: Rates, cores: int) -> float:
    """Predict a step. Ranks share the cores; but the stages of a pipeline cannot all work at the same time, either."""
    works = [sum(each * rate for each, rate in zip(work, rates)) for work in layout.stages]
    shared = sum(works) * layout.ranks / min(cores, len(works) * layout.ranks)
    alone = max(works) * (1 + (len(works) - 1) / layout.micro_batches)
    return max(shared, alone) + rates.waiting * max(work.messages for work in layout.stages)


class Measured(NamedTuple):
    """A run of a sweep."""

    name: str
    layout: Layout
    seconds: float  # of a step


def measured(records: list[dict], progress: bool = False) -> list[Measured]:
    """The runs of a sweep that ended, each with the work of its layout, which takes a dry run of each stage."""
    ended = [each for each in records if each["status"] == "ok"]
    bar = tqdm(ended, unit="dry run", disable=None if progress else True)
    return [Measured(each["id"], layout_of(each["flags"], each["world"]), each["step_time_s"]) for each in bar]


def fit(runs: list[Measured], cores: int) -> Rates:
    """Return the rates with which the mean |log(predicted / measured)| is smallest, found by coordinate descent."""

    def error(tried: Rates) -> float:
        return statistics.mean(abs(math.log(seconds(run.layout, tried, cores) / run.seconds)) for run in runs)

    return descend(Rates(), Rates._fields, error, sweeps=12)


class Judgement(NamedTuple):
    """How well predictions rank runs that the fit has not seen."""

    runs: int
    kendall: float
    error: float  # median of |predicted / measured - 1|
    regret: float  # how much longer the run takes that the model likes best, than the best


def judge(runs: list[Measured], rates: Rates, cores: int) -> Judgement:
    """Compare predicted with measured tokens per second. Runs of a sweep may differ in tokens per step."""
    guesses = [seconds(run.layout, rates, cores) / run.layout.tokens for run in runs]
    found = [run.seconds / run.layout.tokens for run in runs]
    error = statistics.median(abs(guess / real - 1) for guess, real in zip(guesses, found))
    regret = found[guesses.index(min(guesses))] / min(found) - 1
    return Judgement(len(runs), kendall(guesses, found), error, regret)
