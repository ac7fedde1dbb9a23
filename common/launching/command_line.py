"""The command line of every step, made from the fields of `TrainConfig`."""

import argparse
import dataclasses
import functools
import os
import select
import sys
import typing
from contextlib import suppress
from pathlib import Path

from common.config import ROLES, TrainConfig, spelled
from common.errors import UsageError

STEP_NAMES = (
    *("step01_single_gpu", "step02_data_parallel", "step03_zero", "step04_tensor_parallel"),
    *("step05_pipeline", "step06_context_parallel", "step07_expert_parallel", "step08_5d"),
)
FLAGS = [item for item in dataclasses.fields(TrainConfig) if item.metadata]


class OneLineParser(argparse.ArgumentParser):
    """A parser that raises UsageError for bad arguments; argparse would print its usage on every rank and exit."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for kind in (None, str):
            self.register("type", kind, at_home)
        self.register("type", Path, lambda text: Path(at_home(text)))
        self.register("type", "text", str)  # what is no path

    def error(self, message):
        raise UsageError(message)

    def exit(self, status=0, message=None):
        sys.stdout.flush()  # the help; if nobody reads it, the command still hears of it
        super().exit(status, message)


def at_home(path: str) -> str:
    """The path with the home folder for a ~, which shells leave in `--run-dir=~/x`. UsageError if there is none."""
    if f"{path}/".startswith("~/") and os.path.expanduser("~") == "~":  # Python would make a folder called ~ here
        raise UsageError(f"{path} is in a home folder, but HOME is not set and this user is not known")
    return os.path.expanduser(path)


def one_line_errors(main):
    """Decorates the main function of a command that is one process: for bad input it prints a line and returns 2.

    If nobody reads on, as in `COMMAND | head -3`, it returns 141, the status of a program that such a pipe has ended.
    """

    @functools.wraps(main)
    def run(*args, **options) -> int:
        try:
            escape_what_cannot_be_printed()
            status = main(*args, **options) or 0
            sys.stdout.flush()
            return status
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except BrokenPipeError:
            if not _nobody_reads():  # it was another pipe
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
            return 141

    return run


def escape_what_cannot_be_printed() -> None:
    """Let characters that the terminal's encoding lacks appear as on stderr, such as \\u03b2 on an ASCII terminal."""
    with suppress(AttributeError):  # what a notebook has instead
        sys.stdout.reconfigure(errors="backslashreplace")


def _nobody_reads() -> bool:
    """Whether stdout is a pipe whose other end is closed. Windows cannot tell, and has no other pipe here."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are always reported
    return bool(poll.poll(0))


def summary(doc: str | None) -> str:
    """The first line of a docstring; of none, as under python -OO, nothing."""
    return (doc or "").partition("\n")[0]


def title_of(role: str, step: int) -> str:
    """What the help calls the flags of a role that a step brings: `layout, step 4 (tensor parallel)`."""
    name = {"update": "optimisation", "logging": "run"}.get(role, role)
    return name if step == 1 else f"{name}, step {step} ({STEP_NAMES[step - 1][7:].replace('_', ' ')})"


@functools.cache
def parser(step: int) -> argparse.ArgumentParser:
    """The parser of step number `step` (1 to 8), which knows the flags of this step and of all earlier ones."""
    result = OneLineParser(prog=f"{STEP_NAMES[step - 1]}/train.py", usage="%(prog)s [flags]", allow_abbrev=False)
    groups = {}  # of the help, by title, in the order of their first flags
    for item in sorted(FLAGS, key=lambda item: (list(ROLES).index(item.metadata["role"]), item.metadata["step"])):
        kind, choices = (typing.get_args(item.type) or [item.type])[0], item.metadata["choices"]  # int of `int | None`
        options = {"default": item.default, "help": item.metadata["help"]}
        if item.default is not None and kind is not bool:
            options["help"] += " (default: %(default)s)"
        if kind is bool:
            options["action"] = "store_true" if item.default is False else argparse.BooleanOptionalAction
        elif choices:
            options |= {"type": kind, "choices": choices}
        else:
            options |= {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}
        if item.metadata["step"] <= step:
            title = title_of(item.metadata["role"], item.metadata["step"])
            groups[title] = groups.get(title) or result.add_argument_group(title)
            groups[title].add_argument(spelled(item.name), **options)
    return result


def parse(step: int, argv: list[str] | None = None) -> TrainConfig:
    """The configuration that the command line of step number `step` describes. Raises UsageError for unknown flags."""
    argv = sys.argv[1:] if argv is None else argv
    if os.environ.get("RANK", "0") != "0" and not {"-h", "--help"}.isdisjoint(argv):
        raise SystemExit(0)  # rank 0 prints the help
    known, unknown = parser(step).parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0]
        later = [STEP_NAMES[item.metadata["step"] - 1] for item in FLAGS if spelled(item.name) == name]
        where = "".join(f"; {step_name} introduces it" for step_name in later)
        raise UsageError(f"{name} is not a flag of {STEP_NAMES[step - 1]}{where}")
    return TrainConfig(step_name=STEP_NAMES[step - 1], **vars(known))
