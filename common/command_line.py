"""The command line of every step, made from the fields of `TrainConfig`."""

import argparse
import dataclasses
import os
import sys
import typing

from common.config import TrainConfig
from common.errors import UsageError

STEP_NAMES = (
    *("step01_single_gpu", "step02_data_parallel", "step03_zero", "step04_tensor_parallel"),
    *("step05_pipeline", "step06_context_parallel", "step07_expert_parallel", "step08_5d"),
)


class OneLineParser(argparse.ArgumentParser):
    """A parser that answers bad arguments by UsageError, where argparse prints its usage and exits, on every rank."""

    def error(self, message):
        raise UsageError(message)

    def parse_or_exit(self, argv: list[str] | None = None) -> argparse.Namespace:
        """The arguments of a command that is one process; exits with one line and status 2 when they are bad."""
        try:
            return self.parse_args(argv)
        except UsageError as error:
            self.exit(2, f"error: {error}\n")


def _type_of(annotation) -> type:
    """int for `int | None`, bool for `bool`, ..."""
    options = [option for option in typing.get_args(annotation) if option is not type(None)]
    return options[0] if options else annotation


def parser(step: int) -> argparse.ArgumentParser:
    """The parser of step number `step` (1 to 8): flags of this and earlier steps."""
    result = OneLineParser(
        prog=f"{STEP_NAMES[step - 1]}/train.py",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for item in dataclasses.fields(TrainConfig):
        if item.metadata.get("step", step + 1) > step:
            continue
        name, kind = "--" + item.name.replace("_", "-"), _type_of(item.type)
        options = {"default": item.default, "help": item.metadata["help"]}
        if kind is bool and item.default is False:
            options |= {"action": "store_true"}
        elif kind is bool:
            options |= {"action": argparse.BooleanOptionalAction}
        else:
            options |= {"type": kind, "choices": item.metadata["choices"] or None}
            if not item.metadata["choices"]:
                options |= {"metavar": {int: "N", float: "X", str: "TEXT"}[kind]}
        result.add_argument(name, **options)
    return result


def parse(step: int, argv: list[str] | None = None) -> TrainConfig:
    """The configuration that the command line of step `step` asks for. Raises UsageError for what it does not know."""
    argv = sys.argv[1:] if argv is None else argv
    first = parser(step)
    if os.environ.get("RANK", "0") != "0" and any(flag in ("-h", "--help") for flag in argv):
        raise SystemExit(0)  # rank 0 prints the help
    known, unknown = first.parse_known_args(argv)
    if unknown:
        flags = [item for item in dataclasses.fields(TrainConfig) if item.metadata]
        later = {"--" + item.name.replace("_", "-"): item.metadata["step"] for item in flags}
        name = unknown[0].partition("=")[0]
        where = f"; it comes with {STEP_NAMES[later[name] - 1]}" if name in later else ""
        raise UsageError(f"{name} is not a flag of {STEP_NAMES[step - 1]}{where}")
    return TrainConfig(step_name=STEP_NAMES[step - 1], **vars(known))
