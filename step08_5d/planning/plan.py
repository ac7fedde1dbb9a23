"""The command `plan`: from the words of a command line to a task, and all that is printed about it."""

import gc
from argparse import ArgumentParser, Namespace

from common.config import TrainConfig, flag_names, spelled
from common.errors import UsageError
from common.launching.command_line import parse
from common.model_config import ModelConfig
from common.presets import PRESETS
from step08_5d.planning.command_line import (
    Command,
    add_cluster,
    add_model,
    count,
    ends_of,
    machine_of,
    profiles_of,
    sequences_of,
)
from step08_5d.planning.explain import assumed, print_plans
from step08_5d.planning.search import Task, plans
from step08_5d.planning.time.machines import whole_nodes


def add_flags(parser: ArgumentParser) -> None:
    add_model(parser)
    add_cluster(parser)
    parser.add_argument("--shown", type=count, default=8, help="rows of the table")
    parser.add_argument("--interleaved", action="store_true", help="also several stages on each pipeline rank")


def task_of(options: Namespace) -> Task:
    """What the options of the command line ask for. Raises UsageError for what cannot be planned."""
    sequences, model, machine = sequences_of(options), shape(options), machine_of(options)
    if options.seq_len > model.max_positions:
        line = f"--seq-len {options.seq_len} exceeds the {model.max_positions} positions of {options.model}"
        key = "max_position_embeddings of its config.json; without it, transformers' default holds"
        raise UsageError(line if options.model in PRESETS else f"{line} ({key})")
    if 2 * machine.for_gpus(options.gpus).gpus <= machine.gpus < options.gpus:
        whole = " and ".join(f"{each}" for each in whole_nodes(options.gpus, machine.gpus))
        raise UsageError(f"--gpus {options.gpus} must be as many on every node of {machine.gpus}, as {whole} are")
    cluster = options.gpus, options.seq_len, sequences, machine
    return Task(options.model, model, *cluster, profiles=profiles_of(options), shape=tuple(options.rest))


def shape(options: Namespace) -> ModelConfig:
    """The model, with what step 8's flags change in its shape. Raises UsageError for all other flags."""
    config, default = parse(8, ["--model", options.model, *options.rest]), TrainConfig()
    allowed = {"model", "step_name", *flag_names("model")} - {"init_from", "dtype"}
    if other := [name for name, value in vars(config).items() if value != getattr(default, name)]:
        if wrong := set(other) - allowed:
            raise UsageError(f"{spelled(min(wrong))}: of step 8's flags, a plan takes those of the model's shape")
    if config.fp8 != "none":
        raise UsageError("--fp8: the formulas know no scales; --float8 predicts products of 8-bit numbers")
    config.model_config.check()
    return config.model_config


def show(options: Namespace) -> None:
    """Which layout to run on a cluster, what it would cost to be wrong, and why.

    Raises UsageError for what cannot be planned.
    """
    task = task_of(options)._replace(interleaved=options.interleaved)
    print(f"{assumed(task.name, task.model)}\n{task.machine.words(task.gpus)}")
    gc.set_threshold(50_000, 20, 20)  # a search makes many small objects: collections would take a sixth of its time
    print_plans(task, *plans(task), options.shown, ends_of(options))
    if options.float8:
        print("  Its products are those of 8-bit numbers: add --fp8 tile, or another of its kinds")
    if options.gradients == 2:
        print("  It needs another program than ours, whose sums of gradients have four bytes")


COMMAND = Command(add_flags, show, takes_more=True)
