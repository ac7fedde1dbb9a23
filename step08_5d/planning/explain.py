"""Which layout to run, what it would cost to be wrong about the cluster, and why it is this one.

Its reasons are the playbook's three steps (fit, batch, throughput), what the next-best choices cost, and what would
change the choice.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from common.counts import count_parameters
from common.drawing.tables import print_table
from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.planning.changes import INTERLEAVED, Change, interleaving, print_changes
from step08_5d.planning.published.evidence import of_the_same_size, print_evidence
from step08_5d.planning.published.others import OtherRun
from step08_5d.planning.search import CHOICES, EQUAL, MOST_FULL, Candidate, Task, command, firsts, named
from step08_5d.planning.stages import layers_of_ranks
from step08_5d.planning.time.machines import Machine
from step08_5d.planning.time.profiles import Profile
from step08_5d.planning.time.speed import AGAIN, Times, mfu, times

NAMES = {"tp": "tensor parallelism", "pp": "handing on between stages", "dp": "gradients and weights"}
NAMES |= {"cp": "keys and values", "ep": "tokens to experts", "bubble": "the bubble"}
NAMES |= {"launch": "a layer's least time", "update": "the update", "compute": "computing"}
WORKING = ": what a layer at work and the loss need for a moment"
AS_FIRST = {"none": "without recomputation", "selective": "with selective recomputation"}
AS_FIRST |= {"full": "with full recomputation"}
WAITS = (
    "waits: what a step waits for most, besides computing (dp, tp, ...: their messages; launch: a layer's least time)"
)
MFU = "MFU: as in PaLM, attention counts with its full square, also the half that is masked"
FLOAT8 = "; of the peak in BF16, also with products of 8-bit numbers"
WORTH = 0.05  # of a step: what gains less is not announced
LABELS = {"stages": "virtual-stages", "zero_replicas": "zero-replicas", "micro_batch": "micro-batch"}

# ---- ranges ----------------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """The times of a layout by each of some profiles: the range goes from the slowest to the fastest of them."""

    model: ModelConfig
    layout: Layout
    machine: Machine
    times: dict[str, Times]  # by profile

    @classmethod
    def of(cls, model: ModelConfig, layout: Layout, machine: Machine, profiles: tuple[Profile, ...]) -> "Range":
        return cls(model, layout, machine, {each.name: times(model, layout, machine, each) for each in profiles})

    @property
    def ends(self) -> dict[str, Times]:
        """The slowest and the fastest."""
        ordered = sorted(self.times.items(), key=lambda each: -each[1].step)
        return dict((ordered[0], ordered[-1]))

    @property
    def steps(self) -> list[float]:
        return [each.step for each in self.ends.values()]

    @property
    def seconds(self) -> str:
        return joined(f"{each:.2f}" for each in self.steps)

    @property
    def mfu(self) -> str:
        return joined(f"{mfu(self.model, self.layout, each, self.machine):.0%}" for each in self.steps)

    @property
    def speed(self) -> str:
        """Tokens per second and GPU."""
        return joined(f"{self.layout.tokens_per_gpu / each:,.0f}" for each in self.steps)

    @property
    def binds(self) -> list[str]:
        """What takes the most time besides the computation, by the profiles of `waits`: `dp 7%`."""
        found = (self.times[name] for name in outer(self.times))
        return [f"{each.binds} {getattr(each, each.binds) / each.step:.0%}" for each in found]


def outer(profiles: Iterable) -> tuple:
    """The first and the last: of all profiles nanotron and tuned, which most ranges go from and to."""
    profiles = tuple(profiles)
    return tuple(dict.fromkeys((profiles[0], profiles[-1])))


def waits(profiles: tuple[Profile, ...]) -> list[str]:
    """The headers of `Range.binds`."""
    first, *others = (each.name for each in outer(profiles))
    return [f"waits: {first}", *others]


def span_of(profiles: tuple[Profile, ...]) -> str:
    """Between which profiles a `Range` is, for the title of a table."""
    names = ", ".join(each.name for each in profiles)
    return f"slowest ... fastest of {names}" if len(profiles) > 1 else names


def joined(words) -> str:
    """`a ... b`, or `a` if both are the same."""
    return " ... ".join(dict.fromkeys(words))


def most_of_the_rest(found: Times) -> str:
    """What a step needs most besides the computation, and its share of the step."""
    share = getattr(found, found.binds) / found.step
    return f"{NAMES[found.binds]} ({share:.0%})" if share >= 0.005 else "nothing else"


# ---- the choice ------------------------------------------------------------------------------------------------------


def assumed(name: str, model: ModelConfig) -> str:
    """The sizes of a model, in which a slip in its file shows."""
    count, experts = count_parameters(model), ""
    if model.experts:
        experts = f" ({count.active / 1e9:.3g} B active), {model.experts} experts of {model.expert_ffn:,}"
        experts += f" ({model.top_k} a token, {model.shared_experts} shared) after {model.dense_layers} dense layers"
    words = f"{name}: {count.total / 1e9:.3g} B parameters{experts}, {model.layers} layers, hidden {model.hidden:,}, "
    words += f"{model.heads} heads of {model.head_width}, {model.kv_heads} K/V heads, ffn {model.ffn:,}, "
    words += f"vocabulary {model.vocab:,}{', tied' if model.tie_embeddings else ''}"
    more = "\n  routing is assumed to be balanced, and small products as fast as large ones"
    return words + (more if model.experts else "")


def print_plans(task: Task, best: list[Candidate], misfits: Counter, shown: int, profiles: tuple[Profile, ...]) -> None:
    """Which layout to run, what it costs to be wrong, the next ones, why, and the command that runs it."""
    title = f"{task.name}, {task.gpus} {task.machine.name}, {task.sequences} x {task.seq:,} tokens a step"
    tried = any(plan.layout.stages > 1 for plan in best)
    print_regrets(task, best, title, interleaved := [] if tried else interleaving(task, best))
    rows = []
    for plan in different(best)[:shown]:
        span = Range.of(task.model, plan.layout, task.machine, profiles)
        held = f"{sum(plan.held.values()) / 1e9:.0f}"
        rows.append((named(plan.layout), f"{plan.regret:+.0%}", span.mfu, span.speed, span.seconds, held, *span.binds))
    header = ("layout", "at worst", "MFU", "tokens/s/GPU", "s", "GB", *waits(profiles))
    print_table(f"predicted, {span_of(profiles)}: {title}", header, rows)
    print(f"  {WAITS}\n  {MFU}{FLOAT8 if task.machine.float8 else ''}")
    print_steps(task, best, misfits, profiles)
    print_neighbours(best, of_the_same_size(task.model, task.gpus, task.machine.name)[:1])
    print_changes(task, best, interleaved)
    print("\nThis measures the layout; for a training add --data, --tokenizer, --steps, --lr and --save-every:")
    print(command(task, best[0].layout))


def print_regrets(task: Task, best: list[Candidate], title: str, interleaved: Iterable[Change] = ()) -> None:
    """The first plan, the fastest of each profile and plain FSDP: how much slower than what is fastest elsewhere.

    And whether `interleaved` plans would be better by much.
    """
    names, rows = [each.name for each in task.profiles], {"run this": best[0]}
    if len(names) > 1:
        rows |= winners(best)
    rows |= {"plain FSDP": plain(task, best)} if task.gpus > 1 else {}
    cells = []
    for words, plan in rows.items():
        if plan is None:
            why = "does not divide the sequences" if task.sequences % task.gpus else "does not fit"
            cells.append((words, *["-"] * len(names), "-", f"dp {task.gpus}, ZeRO-3 {why}"))
            continue
        costs = (f"{each:+.0%}" for each in (*plan.regrets.values(), plan.regret))
        cells.append((words, *costs, named(plan.layout)))
    header = ("", f"if like {names[0]}", *names[1:], "at worst", "layout")
    print_table(
        f"predicted: what to run, and what it costs if your cluster is not as you think: {title}", header, cells
    )
    print("  a step takes so much longer than that of the layout that is fastest there")
    for each in interleaved:
        if each.words == INTERLEAVED and each.first - each.regret > WORTH:
            print(f"  with --interleaved: about {each.regret:+.0%} at worst instead of {each.first:+.0%}")
    print_copies(plan.layout for plan in [*rows.values(), *(plan for *_, plan in neighbours(best))] if plan)
    print_evidence(task.profiles, task.model, best[0].layout, task.machine)
    print(f"  of layouts that differ by at most {EQUAL:.0%}, the first is the one that sends least to other nodes")


def print_copies(layouts: Iterable[Layout]) -> None:
    """What the word "copies" means, for the first of these layouts that has some."""
    states = "optimizer state", "set of gradients and optimizer state", "set of weights, gradients and optimizer state"
    for layout in [each for each in layouts if each.zero_replicas > 1][:1]:
        ranks = layout.sharing()[0]
        print(f"  {layout.zero_replicas} copies: {ranks} ranks share one {states[layout.zero - 1]}")


def winners(best: list[Candidate]) -> dict[str, Candidate]:
    """The fastest plan for each profile, by words that say so."""
    return {f"fastest if like {name}": min(best, key=lambda plan: plan.seconds[name]) for name in best[0].seconds}


def plain(task: Task, best: list[Candidate]) -> Candidate | None:
    """What one would run without a planner: ZeRO-3 over all GPUs, and recomputation if it does not fit without."""
    found = [plan for plan in best if plan.layout.dp == task.gpus and plan.layout.zero == 3 and plan.layout.ep == 1]
    found = [plan for plan in found if plan.layout.zero_replicas == 1]
    return min(found, key=lambda plan: (AGAIN[plan.layout.recompute], plan.regret), default=None)


def different(best: list[Candidate]) -> list[Candidate]:
    """The best plan of each set of degrees, whatever its schedule, ZeRO, micro-batches and recomputation."""
    found = {}
    for plan in best:
        degrees = plan.layout._replace(
            stages=1, zero=0, zero_replicas=1, micro_batch=1, micro_batches=1, recompute="none"
        )
        found.setdefault(degrees, plan)
    return list(found.values())


def degrees(layout: Layout) -> tuple[int, ...]:
    return layout.dp, layout.tp, layout.pp, layout.cp, layout.ep


# ---- why -------------------------------------------------------------------------------------------------------------


def print_steps(task: Task, best: list[Candidate], misfits: Counter, profiles: tuple[Profile, ...]) -> None:
    """Fit, batch and throughput of the first plan."""
    plan, layout = best[0], best[0].layout
    alone = layout._replace(dp=1, tp=1, pp=1, cp=1, ep=1, zero=0, micro_batch=1, micro_batches=1)
    held, most = sum(plan.held.values()), max(plan.held, key=plan.held.get)
    left_out = ", ".join(f"{number:,} for {kind}" for kind, number in misfits.most_common())
    print(
        f"\n  1. fit: one GPU would need {sum(task.memory(alone).values()) / 1e9:,.0f} GB, "
        f"{AS_FIRST[layout.recompute]}, and may fill {MOST_FULL * task.machine.memory / 1e9:.0f}\n"
        f"     {len(best):,} layouts fit, {sum(misfits.values()):,} do not ({left_out or 'none'})\n"
        f"     The first fills {held / 1e9:.0f} GB, most of it {most}"
        f" ({plan.held[most] / 1e9:.0f} GB{WORKING if most == 'working' else ''})"
    )
    if layout.pp > 1:
        print(f"     Pipeline: {divided(task, layout)}")
    print(
        f"  2. batch: {task.sequences} sequences = dp {layout.dp} x {layout.micro_batches} micro-batches x "
        f"{layout.micro_batch}"
    )
    sent, far = (f"{size / 1e9:,.0f}" for size in plan.sent(task))
    print(f"  3. throughput: each rank sends {sent} GB, {far} of them to other nodes. A step takes")
    for name, found in Range.of(task.model, layout, task.machine, profiles).ends.items():
        parts = [part for part in Times._fields if getattr(found, part) > 0.005 * found.step]
        shares = ", ".join(f"{NAMES[part]} {getattr(found, part) / found.step:.0%}" for part in parts)
        print(f"     {name} {found.step:.2f} s: {shares}")
    if task.interleaved and not any(each.layout.stages > 1 for each in best):
        print("     None that fits is interleaved: the ranks of a pipeline have to divide its micro-batches")
    if layout.stages > 1:
        others = [each.regret for each in best if each.layout.stages == 1]
        print(f"     Without interleaving {f'the best is {min(others):+.0%} at worst' if others else 'nothing fits'}")


def divided(task: Task, layout: Layout) -> str:
    """The layers of the ranks of a pipeline: `7 + 14 x 8 + 7 = 126 layers`."""
    runs = [(layers, len(list(same))) for layers, same in groupby(layers_of_ranks(task.model, layout))]
    words = " + ".join(f"{number} x {layers}" if number > 1 else f"{layers}" for layers, number in runs)
    stages = f" in {layout.stages} stages each, interleaved" if layout.stages > 1 else ", under 1F1B"
    return f"ranks with {words} = {task.model.blocks} layers{stages}; the last one also has the head"


def neighbours(best: list[Candidate], most: int = 2) -> list[tuple[str, object, Candidate]]:
    """For each choice, the best plans that decide it otherwise than the first: by half and by double, or the best two.
    And what it costs to have no copies.

    Args:
        most: plans for each of the choices.
    """
    result, first = [], best[0].layout
    for name in CHOICES if first.pp > 1 else [each for each in CHOICES if each != "stages"]:
        found, mine = firsts(best, name), getattr(first, name)
        near = () if name in ("zero", "recompute") else (mine / 2, 2 * mine)
        others = sorted((value for value in found if value != mine), key=lambda value: value not in near)
        chosen = others[:most] + [value for value in others[most:] if name == "zero_replicas" and value == 1]
        result += [(name, value, found[value]) for value in chosen]
    return result


def print_neighbours(best: list[Candidate], published: Iterable[OtherRun] = ()) -> None:
    """What it costs to decide one thing otherwise, with everything else as good as it can then be; or all degrees as
    in `published` runs, if that fits.
    """
    rows, tried = [], neighbours(best)
    for run in published:
        same = [plan for plan in best if degrees(plan.layout) == degrees(run.layout)][:1]
        tried += [("degrees", f"of {run.system}", plan) for plan in same if plan is not best[0]]
    for name, value, plan in tried:
        costs = [plan.seconds[each] / best[0].seconds[each] - 1 for each in plan.seconds]
        words = f"{LABELS.get(name, name)} {value}"
        words += "" if name == "degrees" else f" and not {getattr(best[0].layout, name)}"
        longer = joined(f"{each + 0.0:+.0%}" for each in (min(costs), max(costs)))
        rows.append((words, longer, f"{sum(plan.held.values()) / 1e9:.0f}", named(plan.layout)))
    title = "what other choices cost, by profile, with the layout that is then best at worst"
    print_table(title, ("", "time", "GB", "the best such layout"), rows)
    if any(longer.startswith("-") for _, longer, *_ in rows):
        print(f"  - is faster, but slower by other profiles; or by {EQUAL:.0%} at most, and sends more to other nodes")
