"""Layouts that you name side by side: how fast, how much memory, and how many bytes over which dimension.

    python -m step08_5d.planning compare --model mixtral-8x7b "--dp 64 --ep 8 --zero 1" "--dp 32 --tp 2 --ep 8 --zero 1"

Each is a text of flags of step 8, such as `plan` prints.
"""

import shlex
from argparse import ArgumentParser, Namespace
from collections import Counter

from common.drawing.tables import print_table
from common.process_groups import DIMENSION_OF
from step08_5d import cost
from step08_5d.cost import Layout
from step08_5d.planning.command_line import Command, add_global_batch, add_gpu, add_model, ends_of, machine_of
from step08_5d.planning.explain import Range, span_of, waits
from step08_5d.planning.memory.peak import memory
from step08_5d.planning.memory.report import DEFAULTS, configuration
from step08_5d.planning.search import MOST_FULL, named
from step08_5d.planning.time.profiles import widest_gradient

SENT = ("tp", "cp", "ep", "pp", "dp")


def add_flags(parser: ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("layouts", nargs="+", help='flags of step 8 in quotes, such as "--dp 4 --tp 2 --zero 1"')
    add_gpu(parser)
    add_global_batch(parser)


def show(options: Namespace) -> None:
    """The table for the options of the command line."""
    machine, ends, rows = machine_of(options), ends_of(options), []
    for text in options.layouts:
        words = [*DEFAULTS.split(), "--model", options.model, "--seq-len", str(options.seq_len)]
        config = configuration([*words, "--global-batch", str(options.global_batch), *shlex.split(text)])
        model, layout = config.model_config, Layout.of(config)
        found, sent = Range.of(model, layout, machine, ends), Counter()
        gradient = widest_gradient(ends)
        for each in cost.messages(model, layout, ends=False, gradient=gradient):
            sent[DIMENSION_OF[each.group]] += each.bytes * each.count
        gpus = layout.copies * layout.tp * layout.pp
        held = sum(memory(model, layout, gradient).values())
        fits = (
            "" if held <= MOST_FULL * machine.memory else f": does not fit into {MOST_FULL * machine.memory / 1e9:.0f}"
        )
        cells = found.mfu, found.seconds, f"{held / 1e9:.0f}{fits}"
        sizes = (f"{sent[name] / 1e9:.1f}" if sent[name] else "" for name in SENT)
        rows.append((gpus, named(layout), *cells, *sizes, *found.binds))
    print(machine.words())
    title = f"{options.model}, {options.gpu}, {options.global_batch} x {options.seq_len:,} tokens a step"
    header = (
        "GPUs",
        "layout",
        "MFU",
        "s",
        "GB held",
        *(f"sent: {SENT[0]}", *SENT[1:]),
        *waits(ends),
    )
    print_table(f"predicted, {span_of(ends)}: {title}", header, rows)
    print("  sent: GB of a rank in a step, in a stage in the middle")


COMMAND = Command(add_flags, show)
