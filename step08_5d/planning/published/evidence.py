"""What the runs behind a profile do not say, and how well the published runs that are like a layout were predicted."""

import math
from functools import cache

from common.counts import count_parameters
from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.planning.memory.peak import memory
from step08_5d.planning.published import others, runs
from step08_5d.planning.published.others import CLOSE, DESCRIBED, OtherRun, judge
from step08_5d.planning.search import MOST_FULL, named
from step08_5d.planning.time.machines import Machine
from step08_5d.planning.time.profiles import PROFILES, Profile, widest_gradient
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
    found |= {"copies": layout.zero_replicas > 1, "tp": layout.tp > 1, "FP8": machine.float8}
    found |= {"latent attention": model.latent is not None, "a second block (MTP)": model.mtp > 0}
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


def is_own(run: OtherRun, model: ModelConfig, gpus: int, gpu: str) -> bool:
    """Whether a run is of this very shape and on these GPUs."""
    theirs, layout = run.model, run.layout
    same = (theirs.layers, theirs.hidden, theirs.heads) == (model.layers, model.hidden, model.heads)
    return same and (layout.copies * layout.tp * layout.pp, run.gpu) == (gpus, gpu)


def print_evidence(profiles: tuple[Profile, ...], model: ModelConfig, layout: Layout, machine: Machine) -> None:
    """What of a layout each profile's runs say nothing of, how many published runs are of its kind, and what was
    reached with models of this size.
    """
    mine, words = uses(model, layout, machine), []
    if new := mine - set().union(*(seen(name)[0] for name in DESCRIBED)):
        print(f"  no run in our tables of published ones has {', '.join(sorted(new))}: for that, only formulas speak")
    for name in (each.name for each in profiles if each.name in PROFILES):
        had, gpus = seen(name)
        if missing := [*sorted(mine - had - new), *({machine.name} - gpus)]:
            words.append(f"behind {name}: {', '.join(missing)}")
    if words or not new:
        nothing = "the runs behind each profile have all that this uses"
        print(f"  missing in the runs {'; '.join(words)}" if words else f"  {nothing}")
    print_alike(model, mine - new - {"experts"})
    room, gpus = MOST_FULL * machine.memory, layout.copies * layout.tp * layout.pp
    for run in of_the_same_size(model, gpus, machine.name)[:3]:
        theirs, fresh = run.layout, unseen()[run]
        where = f"{theirs.copies * theirs.tp * theirs.pp:,} {run.gpu}{f', {run.year}' if run.year else ''}"
        known, new = (run.mfu * run.ratio(each) for each in (DESCRIBED[run.profile], fresh))
        reached = f"{run.mfu:.0%} MFU published, {known:.0%} by a profile fitted to it, {new:.0%} by one that is not"
        if is_own(run, model, gpus, machine.name):
            needs = sum(memory(model, theirs, widest_gradient(profiles)).values())
            reached += "" if needs <= room else f"; by our formula it needs {needs / 1e9:.0f} GB: it does not fit here"
        print(f"  a model of this size: {run.system} ({where}), {named(theirs)}: {reached}")


@cache
def unseen() -> dict[OtherRun, Profile]:
    """For each published run its profile, fitted to all sources but its own."""
    return others.unseen(others.read_runs())


def print_alike(model: ModelConfig, features: set[str]) -> None:
    """How many published runs are of models of this kind and have these features, and how many were predicted."""
    fresh, kind = unseen(), "models with experts" if model.experts else "dense models"
    alike = [run for run in fresh if bool(run.model.experts) == bool(model.experts)]
    words = f"  {len(alike)} of {len(fresh)} published runs are of {kind}, like this one"
    if features:
        had = {run: uses(run.model, run.layout, run.machine) for run in alike}
        counts = [f"{name} in {sum(name in each for each in had.values())}" for name in sorted(features)]
        with_all = [run for run in alike if had[run] >= features]
        counts += [f"together in {len(with_all) or 'none'}"] if len(features) > 1 else []
        words, alike = f"{words}: {', '.join(counts)}", with_all or alike
    choices = {run: DESCRIBED[run.profile] for run in alike}, {run: fresh[run] for run in alike}
    known, new = (judge(each).close * len(alike) for each in choices)
    words += f"; of {len(alike)}, profiles fitted to them predict {known:.0f} within {CLOSE - 1:.0%}"
    print(f"{words}, and those fitted to other sources {new:.0f}")
