"""Layouts that you name side by side: how fast, how much memory, and how many bytes over which dimension.

    python -m step08_5d.planning compare --model mixtral-8x7b "--dp 64 --ep 8 --zero 1" "--dp 32 --tp 2 --ep 8 --zero 1"

Each is a text of flags of step 8, such as `plan` prints.
"""

import shlex
from argparse import ArgumentParser, Namespace
from collections import Counter

from common.config import TrainConfig, flag_names, spelled
from common.drawing.tables import print_table
from common.errors import UsageError
from common.launching.command_line import parse
from common.process_groups import DIMENSION_OF
from step05_pipeline.cost import BUBBLES
from step08_5d import cost
from step08_5d.cost import Layout
from step08_5d.planning.command_line import (
    SEQUENCES,
    Command,
    add_gpu,
    add_model,
    add_tokens,
    count,
    ends_of,
    machine_of,
    sequences_of,
    words_of,
)
from step08_5d.planning.explain import FLOAT8, MFU, WAITS, Range, print_copies, span_of, waits
from step08_5d.planning.memory.peak import memory
from step08_5d.planning.memory.report import SCHEDULES, configuration
from step08_5d.planning.search import MOST_FULL, named
from step08_5d.planning.time.profiles import widest_gradient

SENT = ("tp", "cp", "ep", "pp", "dp")
ALSO = ("order", "seq_len", "global_batch", *flag_names("model"))  # what a layout may have otherwise than the title
HINT = '; put each layout in quotes, with all flags of step 8, as in compare --model llama3-8b "--dp 4 --tp 2" "--dp 8"'


def add_flags(parser: ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("layouts", nargs="+", help='flags of step 8 in quotes, such as "--dp 4 --tp 2 --zero 1"')
    add_gpu(parser)
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--global-batch", type=count, help=f"sequences of a step (default: {SEQUENCES})")
    add_tokens(batch)


def show(options: Namespace) -> None:
    """Layouts that you name side by side: how fast, how much memory, and how many bytes over which dimension.

    Raises UsageError, after the table, for layouts that it cannot have.
    """
    machine, ends, rows, refused, layouts = machine_of(options), ends_of(options), [], [], []
    asked = options.global_batch or (sequences_of(options) if options.tokens_per_batch else None)
    options.global_batch = asked or SEQUENCES
    words, room = [*words_of(options), "--order", machine.order], MOST_FULL * machine.memory
    for text in options.layouts:
        try:
            config = configuration([*words, *shlex.split(text)])
            _check_times(config)
        except (UsageError, ValueError) as error:  # ValueError: a quotation is open
            refused.append(f'"{text}": {error}')
            continue
        model, layout, gradient = config.model_config, Layout.of(config), widest_gradient(ends)
        layouts.append(layout)
        found = Range.of(model, layout, machine._replace(order=config.order), ends)
        sent = Counter()
        for each in cost.messages(model, layout, ends=False, gradient=gradient):
            sent[DIMENSION_OF[each.group]] += each.bytes * each.count
        held = sum(memory(model, layout, gradient).values())
        cells = found.mfu, found.seconds, f"{held / 1e9:.0f}{'' if held <= room else ' *'}"
        sizes = (f"{sent[name] / 1e9:.1f}" if sent[name] else "" for name in SENT)
        gpus = layout.copies * layout.tp * layout.pp
        rows.append((", ".join([named(layout), *_otherwise(config, words)]), gpus, *cells, *sizes, *found.binds))
    if rows:
        print(machine.words())
        title = f"{options.model}, {options.gpu}, {options.global_batch} x {options.seq_len:,} tokens a step"
        header = ("layout", "GPUs", "MFU", "s", "GB held", f"sent: {SENT[0]}", *SENT[1:], *waits(ends))
        print_table(f"predicted, {span_of(ends)}: {title}", header, rows)
        print(f"  sent: GB of a rank in a step, in a stage in the middle that has the mean number of layers\n  {WAITS}")
        if machine.float8:
            print(f"  {MFU}{FLOAT8}")
        print_copies(layouts)
        if not asked and not all("--global-batch" in text for text in options.layouts):
            print(f"  {SEQUENCES} sequences a step, as neither --global-batch nor --tokens-per-batch says otherwise")
        if any(" *" in row[4] for row in rows):
            print(f"  * does not fit: of {machine.memory / 1e9:.0f} GB, {room / 1e9:.0f} may be filled")
        if len({row[1] for row in rows}) > 1:
            print("  the layouts have different numbers of GPUs: compare MFU, and not seconds")
    if refused:
        raise UsageError("; ".join(refused))


def _check_times(config: TrainConfig) -> None:
    """Raise UsageError for what the formula of memory knows, and that of times does not."""
    known = [name for name in SCHEDULES if name in BUBBLES]
    if config.schedule not in known:
        raise UsageError(f"--schedule {config.schedule} is not in the formula of times; it knows {', '.join(known)}")
    if config.dtype == "float32":
        raise UsageError("--dtype float32 is not in the formula of times; it knows bfloat16")


def _otherwise(config: TrainConfig, words: list[str]) -> list[str]:
    """What a layout says itself of what the title says for all."""
    title = parse(8, words)
    return [f"{spelled(name)} {mine}" for name in ALSO if (mine := getattr(config, name)) != getattr(title, name)]


COMMAND = Command(add_flags, show, hint=HINT)
