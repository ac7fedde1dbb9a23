"""What the commands of the planner share: how they are described, the types of their flags, and common ones."""

import argparse
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import NamedTuple

from common.costs.hardware import MATMUL_TFLOPS
from common.errors import UsageError
from common.model_config import ModelConfig
from common.presets import resolve
from step08_5d.planning.time.machines import MACHINES, Machine
from step08_5d.planning.time.profiles import PROFILES, RANGE, Profile


class Command(NamedTuple):
    """A command: what it adds to its parser, and what it does with the options that the parser returns."""

    add_flags: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], None]
    takes_more: bool = False  # whether it also takes flags of step 8: `options.rest`
    hint: str = ""  # what the line about an unknown flag says, too


# ---- types of flags --------------------------------------------------------------------------------------------------

DEFAULTS = "--dtype bfloat16 --micro-batch 1"  # of commands that take flags of step 8, whose own are for a laptop
SEQUENCES = 256  # of a batch, where nothing is said
SLIP = 8  # so many times what a data sheet says is a slip: bits for bytes, or bytes for gigabytes
MOST_TOKENS = 2**30  # of a batch or a sequence: fifty times those of the largest published runs
MOST = 2**20  # GPUs, sequences and the like: more are a slip, and could take all memory


def _at_most(number: int, most: int) -> int:
    if number > most:
        raise argparse.ArgumentTypeError(f"{number} must be at most {most}")
    return number


def _number(text: str, kind: Callable[[str], float], like: str) -> float:
    """The number that a text says. Raises ArgumentTypeError with an example for anything else."""
    try:
        if math.isfinite(number := kind(text)):
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text} is no {like}")


def tokens(text: str) -> int:
    """A number of tokens, such as 4096, 512k or 4M (of 1,024 each), for argparse."""
    unit, like = {"k": 2**10, "m": 2**20}.get(text[-1:].lower(), 1), "whole number of tokens, such as 4096, 8k or 1M"
    number = unit * _number(text, lambda text: float(text[:-1] if unit > 1 else text), like)
    if number < 1 or number % 1:
        raise argparse.ArgumentTypeError(f"{text} is no {like}")
    return _at_most(int(number), MOST_TOKENS)


def count(text: str) -> int:
    """A number of GPUs, ranks or the like, for argparse."""
    if (number := _number(text, int, "whole number, such as 64")) < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return _at_most(number, MOST)


def speed(text: str) -> float:
    """GB/s or TFLOP/s, for argparse."""
    if (number := _number(text, float, "number without a unit, such as 25 or 3.125")) <= 0:
        raise argparse.ArgumentTypeError(f"{number:g} must be above 0")
    return number


# ---- flags that several commands have --------------------------------------------------------------------------------


def add_model(parser: ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a preset, configuration file or Hub name")
    parser.add_argument("--seq-len", type=tokens, default=4096, help="tokens; 8k is 8 x 1,024")


def add_gpu(parser: ArgumentParser) -> None:
    parser.add_argument("--gpu", type=str.upper, choices=MACHINES, default="H100")
    parser.add_argument("--memory", type=speed, metavar="GB", help="of a GPU (default: data sheet)")
    one_way = "GB/s that a GPU sends, in one direction (sheets print both together for NVLink), to"
    parser.add_argument("--within", type=speed, help=f"{one_way} others of its node (default: data sheet)")
    network, node = parser.add_mutually_exclusive_group(), "all cards of a node together, divided by its GPUs"
    words = f"{node}: 3.125 for 8 GPUs with 2 cards of 100 Gbit/s (default: data sheet)"
    network.add_argument("--between", type=speed, help=f"{one_way} other nodes: {words}")
    words = "the busbw in GB/s that nccl-tests prints for a large all-reduce over all GPUs of all nodes, such as 210: "
    words += "what the cards of a node move together. No profile takes a share of it"
    network.add_argument("--bus-bandwidth", type=speed, help=f"instead of --between: {words}")
    words = "products of 8-bit numbers; memory and messages stay those of bfloat16"
    parser.add_argument("--float8", action="store_true", help=words)
    names = ", ".join(each.name for each in RANGE)
    words = f"whose habits (default: a range of all): some of {names}, or your own three shares, such as 0.8,0.12,0.6"
    parser.add_argument("--profile", type=profiles, metavar="NAME[,NAME]", help=words)
    words = "bytes of a gradient in sums: some systems have 2 (default: 4, as in step 8)"
    parser.add_argument("--gradients", type=int, choices=(2, 4), help=words)


def machine_of(options: Namespace) -> Machine:
    """The GPUs and the networks between them. Raises UsageError for products that a GPU does not have."""
    machine, bus = MACHINES[options.gpu], options.bus_bandwidth
    if options.float8 and not MATMUL_TFLOPS[options.gpu][True]:
        raise UsageError(f"--float8: nobody has measured products of 8-bit numbers on {options.gpu}")
    of_node = machine.for_gpus(getattr(options, "gpus", machine.gpus)).gpus
    given = {"memory": options.memory, "near": options.within, "far": bus / of_node if bus else options.between}
    given = {name: 1e9 * value for name, value in given.items() if value}
    flags = {"memory": "--memory", "near": "--within", "far": "--bus-bandwidth" if bus else "--between"}
    for name, value in given.items():
        if (ratio := value / getattr(machine, name)) >= SLIP:
            unit = "GB" if name == "memory" else "GB/s (8 Gbit/s are 1)"
            raise UsageError(f"{flags[name]} is {ratio:,.0f} times what the data sheet says; it is in {unit}")
    return machine._replace(**given, measured=bool(bus), float8=options.float8)


def profiles(text: str) -> tuple[Profile, ...]:
    """Profiles by their names, or yours by the shares of products, of attention and of hiding, for argparse."""
    known, names = {each.name: each for each in RANGE}, text.lower().split(",")
    if known.keys() >= set(names):
        return tuple(known[name] for name in dict.fromkeys(names))
    try:
        shares = [float(each) for each in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3 or not all(0 < each <= 1 for each in shares):
        raise argparse.ArgumentTypeError(f"{text} is none of {', '.join(known)}, nor three shares above 0 and up to 1")
    return (Profile("yours", *shares),)


def ends_of(options: Namespace) -> tuple[Profile, ...]:
    """The profiles between which times range, or those that are asked for."""
    return profiles_of(options, RANGE)


def profiles_of(options: Namespace, otherwise: tuple[Profile, ...] = tuple(PROFILES.values())) -> tuple[Profile, ...]:
    """All profiles whose habits count, or those that are asked for, with gradients of as many bytes as these say."""
    return tuple(each._replace(gradient=options.gradients) for each in options.profile or otherwise)


def add_cluster(parser: ArgumentParser) -> None:
    add_gpu(parser)
    parser.add_argument("--gpus", type=count, required=True, help="of all nodes together")
    parser.add_argument("--nodes", type=_gpus_instead, help=argparse.SUPPRESS)
    add_tokens(parser, 2**20)


def _gpus_instead(nodes: str) -> None:
    raise argparse.ArgumentTypeError("say --gpus, which are those of all nodes together")


def add_tokens(parser, default: int | None = None) -> None:
    words = "such as 8M, which is 8 x 1,024 x 1,024"
    parser.add_argument("--tokens-per-batch", type=tokens, default=default, help=words)


def add_degrees(parser: ArgumentParser) -> None:
    for degree in ("dp", "tp", "pp", "cp", "ep", "micro-batch"):
        parser.add_argument(f"--{degree}", type=count, default=1)


def add_global_batch(parser: ArgumentParser) -> None:
    parser.add_argument("--global-batch", type=count, default=SEQUENCES, help="sequences of a step")


def words_of(options: Namespace) -> list[str]:
    """The flags of step 8 that a command has by itself, and those that it was given."""
    words = [*DEFAULTS.split(), "--model", options.model, "--seq-len", str(options.seq_len)]
    return [*words, "--global-batch", str(options.global_batch), *options.rest]


def add_figure(parser: ArgumentParser, name: str) -> None:
    parser.add_argument("--out", default=f"runs/planning/{name}.png", help="the figure")


def model_of(options: Namespace) -> ModelConfig:
    """The model of --model."""
    return resolve(options.model)


def sequences_of(options: Namespace) -> int:
    """The sequences of a batch of so many tokens. Raises UsageError if they are no whole number."""
    if options.tokens_per_batch % (seq := options.seq_len):
        fewer = options.tokens_per_batch // seq
        nearest = " or ".join(f"{each * seq} ({each:,} x {seq})" for each in (fewer, fewer + 1) if each)
        line = f"--tokens-per-batch {options.tokens_per_batch} is no multiple of --seq-len {seq}"
        raise UsageError(f"{line}; try {nearest}")
    if (sequences := options.tokens_per_batch // options.seq_len) > MOST:
        raise UsageError(f"--tokens-per-batch {options.tokens_per_batch} are more than {MOST} sequences")
    return sequences
