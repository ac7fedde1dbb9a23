"""How long a step takes on the machine at hand: what dry runs count, times a few rates that measured runs show.

The model of `time/speed.py` is one of GPUs. Ranks on a CPU share its cores, and each small operation costs as much as a
large one. So here a rank's work is what its dry run counts, and a machine is six numbers. They are fitted to some of a
sweep's runs: all are seconds for something, so the fit is linear, and none can be negative. Whether they are any good,
the other runs say.
"""

import json
import math
import shlex
import statistics
from typing import NamedTuple

from tqdm import tqdm

from common.launching.run_mesh import degrees_of
from common.nodes import value_of
from common.process_groups import all_groups
from step05_pipeline.config import schedule_of
from step05_pipeline.schedules.actions import Schedule
from step05_pipeline.schedules.simulator import Costs
from step08_5d.planning.dry_run.play import DryRun, configuration, dry_run, first_ranks
from step08_5d.planning.fitting import kendall, nonnegative_least_squares
from step08_5d.planning.sweeps.sweep import OF_NODES, Sweep, fastest

CLOSE = 0.03  # runs that are further off than this (relative) count less in a fit: something may have disturbed them


class RankWork(NamedTuple):
    """What a rank does in a step."""

    flops: float
    operations: float
    sent: float  # bytes
    waits: float = 0.0  # for messages that nothing hides: one for each, two for an all-reduce
    far: float = 0.0  # bytes of these that leave the node while nobody computes, on average over ranks that do the same
    behind: float = 0.0  # the same of gradients and weights, which may hide behind computing
    hops: float = 0.0  # messages between nodes that wait for each other


class LayoutWork(NamedTuple):
    """What all ranks of a layout do, as far as time depends on it."""

    stages: list[RankWork]  # of one rank at each place in the pipeline; others there do the same
    tokens: int  # of all ranks in a step
    stretch: float = 1.0  # a step takes so many times the work of `stages`, added up: see `on_cores`
    turns: float = 1.0  # ranks for each core, or 1
    cable: float = 0.0  # seconds that a node's cable needs for what its ranks send to other nodes (`far`),
    behind: float = 0.0  # and for what may hide


class Rates(NamedTuple):
    """Seconds that a core needs for each of a `RankWork`, and what a rank waits for beyond that."""

    flops: float = 2e-11
    operations: float = 1e-5
    sent: float = 1e-9
    waits: float = 1e-4  # until a message of the busiest rank has arrived, if every rank has a core of its own
    cable: float = 1.0  # for each second that a cable is busy,
    behind: float = 1.0  # and for each second that it is busy with what may hide: below 1, as far as that hides


OF_CORES = 3  # the first rates are for work, which cores share; the others are for waiting


def work_of_rank(run: DryRun, rank: int, of_node: int | None = None) -> RankWork:
    """What a dry run has counted, in numbers of `RankWork`.

    Args:
        of_node: how many ranks are on each node (default: all).
    """
    groups, waits = all_groups(degrees_of(run.config), run.config.model_config.kv_heads), 0.0
    far, hops = {False: 0.0, True: 0.0}, 0.0  # far: by whether it may hide
    for (group, op), (number, size) in run.sent.items():
        ranks = next(each for each in groups[group] if rank in each)
        of_weights = "shard" in group or "replica" in group
        # Those of weights and gradients, and keys and values of a ring, travel while the rank computes
        if not (of_weights or group == "cp" and op != "all_to_all"):
            waits += number * (2 if op == "all_reduce" else 1)
        if of_node and (leaving := share_between_nodes([each // of_node for each in ranks], group, op)):
            far[of_weights] += size * leaving
            hops += number * (2 * (len(ranks) - 1) if op == "all_reduce" else 1)
    sent = sum(size for _, size in run.sent.values())
    return RankWork(run.flops, run.operations, sent, waits, far[False], far[True], hops)


def share_between_nodes(nodes: list[int], group: str, op: str) -> float:
    """Return which share of a group's bytes is sent from one node to another, if its ranks are on these nodes.

    Stages send to their neighbours. An all-reduce of gloo, and ring attention, send to the next rank in a circle.
    Everything else goes from every rank straight to every other one (common/gloo.py).
    """
    if group.startswith("pp_"):
        pairs = list(zip(nodes, nodes[1:]))
    elif op in ("send", "all_reduce"):
        pairs = list(zip(nodes, [*nodes[1:], nodes[0]]))
    else:
        pairs = [(one, other) for i, one in enumerate(nodes) for j, other in enumerate(nodes) if i != j]
    return statistics.mean(one != other for one, other in pairs)


def work_of_layout(flags: list[str], world: int, nodes: dict[str, object], cores: int) -> LayoutWork:
    """Count what the ranks of a layout do, in a dry run of one rank of each stage.

    Args:
        flags: of step 8. nodes: flags of `common.nodes`, if any. cores: that the ranks share.

    Raises UsageError as a real run does.
    """
    config, of_node = configuration(flags, world), world // nodes["nodes"] if nodes else None
    first = first_ranks(degrees_of(config))
    works = [work_of_rank(dry_run(config, rank, like_gloo=True), rank, of_node) for rank in first]
    cable = behind = 0.0
    if "bandwidth" in nodes:
        of_cable = 8 * of_node / value_of(nodes["bandwidth"])  # seconds, for a byte of each rank
        cable, behind = (of_cable * statistics.mean(each) for each in zip(*((work.far, work.behind) for work in works)))
    if "latency" in nodes:
        cable += max(work.hops for work in works) * value_of(nodes["latency"])
    flops = [work.flops for work in works]
    stretch = on_cores(schedule_of(config), flops, world // len(first), cores) / sum(flops)
    return LayoutWork(works, config.global_batch * config.seq_len, stretch, max(1, world / cores), cable, behind)


def on_cores(schedule: Schedule, works: list[float], peers: int, cores: int) -> float:
    """Play a schedule whose ranks share cores, and return when it ends. Messages take no time.

    It is step 5's `simulate`, but all ranks that have something to do share the cores equally.

    Args:
        works: how long each pipeline rank's actions take on a core of its own.
        peers: how many ranks do the same as each of these.
    """
    costs, ended, now = Costs(), set(), 0.0
    unit = [work / sum(costs.of(each.kind) for each in row) for work, row in zip(works, schedule.actions)]
    position, running = [0] * len(works), {}  # running: what is left of each rank's action
    while True:
        for rank, row in enumerate(schedule.actions):
            if rank not in running and position[rank] < len(row):
                needed = schedule.input_of(rank, row[position[rank]])
                if needed is None or needed in ended:
                    running[rank] = costs.of(row[position[rank]].kind) * unit[rank]
        if not running:
            return now
        next_end = min(running.values())
        now += next_end * max(1, len(running) * peers / cores)
        running = {rank: left - next_end for rank, left in running.items()}
        for rank in [rank for rank, left in running.items() if left <= 1e-9 * unit[rank]]:
            ended.add(schedule.output_of(rank, schedule.actions[rank][position[rank]]))
            position[rank] += 1
            del running[rank]


def costs_of(layout: LayoutWork) -> list[float]:
    """Return what a step consists of, in the order of `Rates`: the sum of costs times rates is its time.

    Ranks share the cores, so that their work adds up; while a pipeline fills and drains, some cores idle. Where ranks
    share cores, a rank also waits for its turn after a message has arrived.
    """
    work = [layout.stretch * sum(each) for each in list(zip(*layout.stages))[:OF_CORES]]
    return [*work, layout.turns * max(work.waits for work in layout.stages), layout.cable, layout.behind]


def seconds(layout: LayoutWork, rates: Rates) -> float:
    """Predict how long a step takes."""
    return _dot(costs_of(layout), rates)


def _dot(some: list[float], rates: Rates) -> float:
    return sum(each * rate for each, rate in zip(some, rates))


class Measured(NamedTuple):
    """A run of a sweep that ended."""

    record: dict
    layout: LayoutWork

    @property
    def name(self) -> str:
        return self.record["id"]

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.record["step_time_s"]


def measured(asked: Sweep, cores: int) -> list[Measured]:
    """The runs of a sweep that ended, each with the work of its layout, which takes a dry run of each stage.

    What dry runs have counted is kept in the sweep's folder, in work.json.
    """
    file, result = asked.folder / "work.json", []
    played = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for each in tqdm(fastest(asked.folder), unit="dry run", disable=None):
        nodes = {name: value for name, value in each["values"].items() if name in OF_NODES}
        key = f"{each['world']} ranks, {cores} cores, {nodes}: {shlex.join(each['flags'])}"
        if key not in played:
            played[key] = work_of_layout(each["flags"], each["world"], nodes, cores)
            file.write_text(json.dumps(played), encoding="utf-8")
        works, *others = played[key]
        result.append(Measured(each, LayoutWork([RankWork(*work) for work in works], *others)))
    return result


def fit(runs: list[Measured]) -> Rates:
    """Return the rates with which predicted / measured is closest to 1: non-negative least squares.

    How much a run counts depends on how far off it is with the rates found before, until they stay (or for 50 rounds).
    """
    rows = [[each / run.seconds for each in costs_of(run.layout)] for run in runs]
    rates, weights = Rates(), [1.0] * len(runs)
    for _ in range(50):
        best = nonnegative_least_squares(rows, [1.0] * len(runs), weights)
        # a cable that none of these runs has keeps its default
        found = Rates(*(rate if any(some) else default for rate, some, default in zip(best, zip(*rows), Rates())))
        weights = [1 / max(CLOSE, abs(_dot(row, found) - 1)) for row in rows]
        if all(math.isclose(old, new, rel_tol=1e-6) for old, new in zip(rates, found)):
            break
        rates = found
    return rates


class Judgement(NamedTuple):
    """How well some seconds predict others of the same runs."""

    runs: int
    kendall: float
    error: float  # median of |predicted / measured - 1|
    regret: float  # how much longer the run takes that is predicted to be the best, than the best


def compare(predicted: list[float], measured: list[float]) -> Judgement:
    """Judge predictions by what was measured."""
    error = statistics.median(abs(guess / real - 1) for guess, real in zip(predicted, measured))
    regret = measured[predicted.index(min(predicted))] / min(measured) - 1
    return Judgement(len(measured), kendall(predicted, measured), error, regret)


def judge(runs: list[Measured], rates: Rates) -> Judgement:
    """Judge rates by the seconds of a token, as runs of a sweep may differ in tokens per step."""
    guesses = [seconds(run.layout, rates) / run.layout.tokens for run in runs]
    return compare(guesses, [run.seconds / run.layout.tokens for run in runs])


def scatter(history: dict[str, list[dict]]) -> Judgement | None:
    """How well a run's last repetition predicts the one before, which no model can exceed.

    None if fewer than three runs have ended twice.
    """
    ended = ([each for each in records if each["status"] == "ok"][-2:] for records in history.values())
    pairs = [[1 / each["tokens_per_s"] for each in two] for two in ended if len(two) == 2]
    return compare([last for _, last in pairs], [before for before, _ in pairs]) if len(pairs) > 2 else None
