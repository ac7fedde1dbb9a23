"""The playbook's recipe for 1,024 GPUs and more (tp 8, ZeRO-2 and a pipeline) beside ZeRO-1 and ZeRO-3."""

import math
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from typing import NamedTuple

from common.drawing.tables import print_table
from common.errors import UsageError
from common.model_config import ModelConfig
from step08_5d import cost
from step08_5d.cost import Layout
from step08_5d.planning.command_line import Command, add_cluster, add_model, ends_of, machine_of, model_of, sequences_of
from step08_5d.planning.explain import Range, span_of
from step08_5d.planning.memory.peak import memory
from step08_5d.planning.search import MOST_FULL, Task, divisors, named
from step08_5d.planning.time.profiles import RANGE, Profile, widest_gradient

TP = 8


class Choice(NamedTuple):
    """The best layout that fits with these stages and this stage of ZeRO."""

    layout: Layout
    held: float  # bytes
    span: Range
    sent: float  # bytes of gradients and weights that a rank sends in a step

    @property
    def seconds(self) -> float:
        """The geometric mean of the ends."""
        return math.prod(self.span.steps) ** (1 / len(self.span.steps))


def choices(task: Task, ends: tuple[Profile, ...] = RANGE) -> dict[tuple[int, int], Choice | None]:
    """By pp and ZeRO; None where nothing fits."""
    found = {}
    for pp in (each for each in divisors(task.model.layers) if each <= 20 and task.gpus % (TP * each) == 0):
        dp = task.gpus // TP // pp
        for zero in range(4) if task.sequences % dp == 0 else ():
            found[pp, zero] = _best(task, ends, Layout(task.seq, dp, pp, tp=TP, zero=zero, dtype="bfloat16"))
    return found


def _best(task: Task, ends: tuple[Profile, ...], layout: Layout) -> Choice | None:
    of_rank, result = task.sequences // layout.dp, None
    for size in (each for each in divisors(of_rank, 16) if each & (each - 1) == 0):
        for recompute in ("none", "full"):
            tried = layout._replace(micro_batch=size, micro_batches=of_rank // size, recompute=recompute)
            gradient = widest_gradient(ends)
            held = sum(memory(task.model, tried, gradient).values())
            sent = cost.messages(task.model, tried, ends=False, gradient=gradient)
            total = sum(each.bytes * each.count for each in sent if each.group in ("shard", "replica"))
            found = Choice(tried, held, Range.of(task.model, tried, task.machine, ends), total)
            if held <= MOST_FULL * task.machine.memory and (result is None or found.seconds < result.seconds):
                result = found
    return result


def batch_ways(model: ModelConfig, layout: Layout) -> dict[str, Layout]:
    """Return how to double and to halve a step's tokens, by each means that this layout has. dp and cp change GPUs.

    Sequences of twice the length on twice the ranks of cp leave a rank as many tokens. ep changes nothing, since its
    ranks are some of dp, cp and tp; only, it must divide them.
    """
    found = {"as it is": layout}
    double = {"dp": {"dp": 2 * layout.dp}, "micro-batches": {"micro_batches": 2 * layout.micro_batches}}
    double |= {"micro-batch": {"micro_batch": 2 * layout.micro_batch}}
    double |= {"cp and sequences": {"cp": 2 * layout.cp, "seq": 2 * layout.seq}}
    found |= {f"up: twice the {name}": layout._replace(**changes) for name, changes in double.items()}
    for name, changes in double.items():
        halves = {key: getattr(layout, key) // 2 for key in changes}
        ranks = halves.get("dp", layout.dp) * halves.get("cp", layout.cp) * layout.tp
        if min(halves.values()) and not any(getattr(layout, key) % 2 for key in changes) and ranks % layout.ep == 0:
            found[f"down: half the {name}"] = layout._replace(**halves)
    return found


def print_batch_ways(task: Task, layout: Layout, ends: tuple[Profile, ...]) -> None:
    """What each way to another batch would mean: GPUs, tokens, time and memory."""
    rows = []
    for name, each in batch_ways(task.model, layout).items():
        gpus = each.dp * each.cp * each.tp * each.pp
        tokens = each.dp * each.micro_batches * each.micro_batch * each.seq
        model = replace(task.model, max_positions=max(task.model.max_positions, each.seq))
        span, held = Range.of(model, each, task.machine, ends), sum(memory(model, each, widest_gradient(ends)).values())
        cells = f"{gpus:,}", f"{tokens / 2**20:g}M", span.seconds, span.speed, f"{held / 1e9:.0f}"
        rows.append((name, *cells))
    header = ("", "GPUs", "tokens a step", "s", "tokens/s per GPU", "GB")
    print_table(f"predicted: another batch, from {named(layout)}", header, rows)


def add_flags(parser: ArgumentParser) -> None:
    add_model(parser)
    add_cluster(parser)


def show(options: Namespace) -> None:
    """The table for the options of the command line."""
    sequences, model = sequences_of(options), model_of(options)
    model = replace(model, max_positions=max(model.max_positions, options.seq_len))
    if model.heads % TP or model.ffn % TP or (model.kv_heads % TP and TP % model.kv_heads):
        raise UsageError(f"--model {options.model}: tp {TP} does not divide its {model.heads} heads, or its MLP")
    task = Task(options.model, model, options.gpus, options.seq_len, sequences, machine_of(options))
    ends = ends_of(options)
    found, rows = choices(task, ends), []
    if not found:
        rule = f"dp x tp {TP} x pp must make them up, pp divide {model.layers} layers and dp {sequences} sequences"
        raise UsageError(f"--gpus {options.gpus}: {rule}")
    for (pp, zero), choice in found.items():
        if choice is None:
            rows.append((f"pp {pp}, ZeRO-{zero}", *["-"] * 5, "does not fit"))
            continue
        layout = choice.layout
        words = f"{layout.micro_batches} x {layout.micro_batch}{', recompute' if layout.recompute == 'full' else ''}"
        cells = (choice.span.mfu, choice.span.seconds, f"{choice.held / 1e9:.0f}", f"{choice.sent / 1e9:.1f}")
        rows.append((f"pp {pp}, ZeRO-{zero}", layout.dp, *cells, words))
    title = (
        f"predicted, {span_of(ends)}: {options.model}, {options.gpus:,} {options.gpu}, "
        f"tp {TP}, {sequences} x {options.seq_len:,} tokens"
    )
    header = ("", "dp", "MFU", "s", "GB", "GB sent for dp", "micro-batches")
    print(task.machine.words(task.gpus))
    print_table(title, header, rows)
    if fitting := [choice for choice in found.values() if choice]:
        print_batch_ways(task, min(fitting, key=lambda choice: choice.seconds).layout, ends)


COMMAND = Command(add_flags, show)
