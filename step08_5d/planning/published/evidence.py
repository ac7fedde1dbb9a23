"""What the runs behind a profile do not say, and how well the published runs that are like a layout were predicted."""

import math
from functools import cache

from common.counts import count_parameters
from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.planning.published import others, runs
from step08_5d.planning.published.others import CLOSE, DESCRIBED, OtherRun, judge
from step08_5d.planning.search import named
from step08_5d.planning.time.machines import Machine
from step08_5d.planning.time.profiles import PROFILES, Profile
from step08_5d.planning.time.speed import spans

OF_NANOTRON = "nanotron"  # its profile is fitted to the playbook's runs, the others to those of other systems
LONG = 8192  # tokens
SAME = 0.03  # models are of the same size if their parameters differ by less than this (relative)


def kinds(model: ModelConfig, layout: Layout, machine: Machine) -> dict[str, bool]:
    """What a profile's runs may say nothing of, and whether a layout has it."""
    tp_nodes = spans(layout, "tp", machine)[0]
    found = {"ZeRO-3": layout.zero == 3, "cp": layout.cp > 1, "experts": model.experts > 0, "pipelines": layout.pp > 1}
    found |= {"interleaving": layout.stages > 1, "recomputation": layout.recompute != "none"}
    found |= {"tp across nodes": tp_nodes > 1, "sequences beyond 8k": layout.seq > LONG}
    return found | {"fewer than 8 GPUs": layout.copies * layout.tp * layout.pp < 8}


def uses(model: ModelConfig, layout: Layout, machine: Machine) -> set[str]:
    return {name for name, has in kinds(model, layout, machine).items() if has}


@cache
def seen(name: str) -> tuple[set[str], set[str]]:
    """What the runs behind a profile have, and their GPUs."""
    if name == OF_NANOTRON:
        some, gpus = [(run.model, run.layout, runs.H100) for run in runs.read_runs()], {runs.H100.name}
    else:
        theirs = [run for run in others.read_runs() if run.profile == name]
        some, gpus = [(run.model, run.layout, run.machine) for run in theirs], {run.gpu for run in theirs}
    return set().union(*(uses(*each) for each in some)), gpus


def unknown(name: str) -> str:
    """All that the runs behind a profile say nothing of."""
    had, gpus = seen(name)
    never = kinds(others.read_runs()[0].model, Layout(0), runs.H100).keys() - had
    return ", ".join([*sorted(never), f"GPUs other than {', '.join(sorted(gpus))}"])


def of_the_same_size(model: ModelConfig, gpus: int, gpu: str) -> list[OtherRun]:
    """The published runs of a model with as many parameters, of each system one: on such GPUs and as many, if any."""
    size, found = count_parameters(model).total, {}

    def far(run: OtherRun) -> tuple:
        return run.gpu != gpu, abs(math.log(run.layout.copies * run.layout.tp * run.layout.pp / gpus)), -run.mfu

    for run in sorted(others.read_runs(), key=far):
        if abs(count_parameters(run.model).total / size - 1) < SAME and bool(run.model.experts) == bool(model.experts):
            found.setdefault(run.system, run)
    return list(found.values())


def print_evidence(profiles: tuple[Profile, ...], model: ModelConfig, layout: Layout, machine: Machine) -> None:
    """What of a layout each profile's runs say nothing of, how many published runs are of its kind, and what was
    reached with models of this size.
    """
    mine, words = uses(model, layout, machine), []
    for name in (each.name for each in profiles if each.name in PROFILES):
        had, gpus = seen(name)
        if missing := [*sorted(mine - had), *({machine.name} - gpus)]:
            words.append(f"behind {name}: {', '.join(missing)}")
    nothing = "the runs behind each profile have all that this uses"
    print(f"  missing in the runs {'; '.join(words)}" if words else f"  {nothing}")
    theirs, like = others.read_runs(), f" ({', '.join(sorted(mine))})" if mine else ""
    alike = [run for run in theirs if uses(run.model, run.layout, run.machine) >= mine]
    alike = [run for run in alike if (run.model.experts > 0) == (model.experts > 0)]
    words = f"  {len(alike)} of {len(theirs)} published runs use it, too{like}"
    if alike:
        close = judge({run: DESCRIBED[run.profile] for run in alike}).close * len(alike)
        words += f"; profiles fitted to them predict {close:.0f} within {CLOSE - 1:.0%}"
    print(words)
    for run in of_the_same_size(model, layout.copies * layout.tp * layout.pp, machine.name)[:3]:
        theirs, predicted = run.layout, run.mfu * run.ratio(DESCRIBED[run.profile])
        where = f"{theirs.copies * theirs.tp * theirs.pp:,} {run.gpu}{f', {run.year}' if run.year else ''}"
        reached = f"{run.mfu:.0%} MFU published, {predicted:.0%} by a profile fitted to it, too"
        print(f"  a model of this size: {run.system} ({where}), {named(theirs)}: {reached}")
