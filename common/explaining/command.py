"""`python -m common.compare A B --explain`: the flags of the diagnosis, and what it prints."""

import argparse
import textwrap

from common.errors import UsageError
from common.explaining.logs import NAMES, read_log
from common.explaining.verdict import BUG, ROUNDING, explain


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("is it rounding, or a bug?")
    group.add_argument("--explain", action="store_true", help="judge two runs, or logs of any program (JSONL, CSV)")
    group.add_argument("--type", help="the type that they compute in (default: what the run record says)")
    group.add_argument("--columns", default="", help="for names that are not known: step=it,loss=L,grad_norm=|g|")
    group.add_argument("--plot", metavar="FILE", help="draw the difference in the band of rounding (PNG)")


def explain_files(arguments: argparse.Namespace) -> int:
    """Print the verdict and its reasons. The exit status is 0 for rounding, 1 for a bug, 3 if nobody can tell."""
    if arguments.tolerance is not None:
        raise UsageError("--tolerance has no meaning with --explain, which has a band of its own")
    if len(arguments.runs) != 2:
        raise UsageError(f"--explain compares two runs, not {len(arguments.runs)}")
    columns = dict(part.partition("=")[::2] for part in filter(None, arguments.columns.split(",")))
    if unknown := columns.keys() - NAMES.keys():
        raise UsageError(f"--columns {unknown.pop()}: only {', '.join(NAMES)} are read")
    logs = [read_log(path, columns) for path in arguments.runs]
    for key, name in columns.items():
        if all(log.columns.get(key) != name for log in logs):
            raise UsageError(f"--columns {key}={name}: neither {arguments.runs[0]} nor {arguments.runs[1]} has it")
    result = explain(*logs, arguments.type, arguments.steps)
    for line in str(result).splitlines():
        print(textwrap.fill(line, 110, subsequent_indent="    ", break_long_words=False))
    if arguments.plot:
        from common.explaining.picture import draw  # here, so that nobody else waits for matplotlib

        print(f"picture: {draw(result, tuple(arguments.runs), arguments.plot)}")
    return {ROUNDING: 0, BUG: 1}.get(result.verdict, 3)
