"""The command `plan`: the fastest layouts of a model on a cluster, and why the first of them won."""

from argparse import ArgumentParser, Namespace

from common.errors import UsageError
from common.presets import resolve
from step08_5d.planning.command_line import Command, add_cluster, add_model, count, sequences_of, speed
from step08_5d.planning.explain import print_plans
from step08_5d.planning.search import Task, plans
from step08_5d.planning.time.machines import MACHINES


def add_flags(parser: ArgumentParser) -> None:
    add_model(parser)
    add_cluster(parser)
    parser.add_argument("--shown", type=count, default=8, help="rows of the table")
    parser.add_argument("--interleaved", action="store_true", help="also several stages on each pipeline rank")
    parser.add_argument("--within", type=speed, help="GB/s of a GPU to others of its node (default: data sheet)")
    parser.add_argument("--between", type=speed, help="GB/s of a GPU to other nodes (default: data sheet)")


def show(options: Namespace) -> None:
    """The tables for the options of the command line. Raises UsageError for what cannot be planned."""
    sequences, model, machine = sequences_of(options), resolve(options.model), MACHINES[options.gpu]
    if options.seq_len > model.max_positions:
        raise UsageError(f"--seq-len {options.seq_len} exceeds the {model.max_positions} positions of {options.model}")
    if options.gpus % -(-options.gpus // machine.gpus):
        raise UsageError(f"--gpus {options.gpus} must be as many on every node of {machine.gpus}")
    if options.within:
        machine = machine._replace(near=1e9 * options.within)
    if options.between:
        machine = machine._replace(far=1e9 * options.between)
    task = Task(options.model, model, options.gpus, options.seq_len, sequences, machine, options.interleaved)
    print_plans(task, *plans(task), options.shown)


COMMAND = Command(add_flags, show)
