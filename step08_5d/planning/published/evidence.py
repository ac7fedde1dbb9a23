"""What the runs behind a profile do not say, and how well the published runs that are like a layout were predicted."""

from functools import cache

from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.planning.published import others, runs
from step08_5d.planning.published.others import CLOSE, DESCRIBED, judge
from step08_5d.planning.time.machines import Machine
from step08_5d.planning.time.profiles import PROFILES, Profile
from step08_5d.planning.time.speed import spans

OF_NANOTRON = "nanotron"  # its profile is fitted to the playbook's runs, the others to those of other systems
LONG = 8192  # tokens


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
        some = [(run.model, run.layout, runs.H100) for run in runs.read_runs()]
    else:
        some = [(run.model, run.layout, run.machine) for run in others.read_runs() if run.profile == name]
    return set().union(*(uses(*each) for each in some)), {machine.name for *_, machine in some}


def unknown(name: str) -> str:
    """All that the runs behind a profile say nothing of."""
    had, gpus = seen(name)
    never = kinds(others.read_runs()[0].model, Layout(0), runs.H100).keys() - had
    return ", ".join([*sorted(never), f"GPUs other than {', '.join(sorted(gpus))}"])


def print_evidence(profiles: tuple[Profile, ...], model: ModelConfig, layout: Layout, machine: Machine) -> None:
    """What of a layout each profile's runs say nothing of, and how many published runs are of its kind."""
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
