"""Which rank is in which group: a table, and with --plot a picture, for any number of ranks and any degrees.

python -m common.groups --world 16 --tp 2 --cp 2 --pp 2 --ep 4 --zero 1 --zero-replicas 2
python -m common.groups runs/mine --rank 5
"""

import argparse
import json
import typing
from pathlib import Path

import common.entry  # noqa: F401

# isort: split
from common.config import TrainConfig, spelled
from common.drawing.groups import NODE, draw, kinds
from common.drawing.tables import aligned
from common.errors import UsageError
from common.launching.command_line import FLAGS, OneLineParser, one_line_errors, summary
from common.process_groups import AXES, Degrees, all_groups, coordinates

ASKED = "tp", "cp", "pp", "dp", "ep", "zero", "zero_replicas", "experts", "kv_heads", "order"  # flags of training
MOST_RANKS = 1 << 20  # of a world: all of their groups take some seconds and a GB
SHOWN = 4  # ranks of a group that a cell of the table shows


def degrees_asked_for(options: argparse.Namespace) -> Degrees:
    """The degrees of the flags, as training takes them. Raises UsageError, in one line, for what it would refuse."""
    for name in ("world", *ASKED):
        value = getattr(options, name)
        if type(value) is int and value < (least := 0 if name in ("zero", "experts") else 1):
            raise UsageError(f"{spelled(name)} {value} must be at least {least}")
    if options.world > MOST_RANKS:
        raise UsageError(f"--world {options.world:,} is more than {MOST_RANKS:,} ranks")
    axes = tuple(reversed(options.order.split(",")))
    if sorted(axes) != sorted(AXES):
        raise UsageError(f"--order {options.order} must name tp, cp, pp and dp, each once, separated by commas")
    config = TrainConfig(tp=options.tp, cp=options.cp, pp=options.pp, dp=options.dp)
    config.resolve_and_check(options.world)
    tokens, stage = config.dp * config.cp, config.dp * config.cp * config.tp
    if (heads := options.kv_heads) and heads % config.tp and config.tp % heads:
        raise UsageError(f"--tp {config.tp} and --kv-heads {heads}: one must divide the other")
    if tokens % options.zero_replicas:
        ranks = f"dp {config.dp}" + f" x cp {config.cp}" * (config.cp > 1)
        raise UsageError(f"--zero-replicas {options.zero_replicas} does not divide {ranks}")
    if not options.zero and options.zero_replicas > 1:
        raise UsageError(f"--zero-replicas {options.zero_replicas} needs --zero 1, 2 or 3")
    if (options.experts or 0) % options.ep:
        raise UsageError(f"--ep {options.ep} does not divide --experts {options.experts}")
    if stage % options.ep:
        raise UsageError(f"--ep {options.ep} does not divide the {stage} ranks of a stage (dp x cp x tp)")
    replicas = options.zero_replicas if options.zero else tokens
    experts = options.ep > 1 or bool(options.experts)
    return Degrees(config.tp, config.cp, config.pp, config.dp, options.ep, replicas, experts, axes)


def degrees_of_run(folder: str) -> tuple[Degrees, int]:
    """The degrees of a run and its number of K/V heads, from its config.json. Raises UsageError if that has none."""
    try:
        facts = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        degrees = facts["degrees"] | {"axes": tuple(facts["degrees"]["axes"])}
        return Degrees(**degrees), facts["model_config"]["kv_heads"]
    except (OSError, ValueError, TypeError, KeyError):
        raise UsageError(f"{folder} is not the folder of a run: it has no config.json with degrees") from None


def shortened(ranks: tuple[int, ...]) -> str:
    """The ranks of a group as a cell: of many, the first ones, the last one and how many there are."""
    if len(ranks) <= SHOWN:
        return " ".join(map(str, ranks))
    return " ".join([*map(str, ranks[: SHOWN - 2]), "..", f"{ranks[-1]}", f"({len(ranks)})"])


def by_name(degrees: Degrees, kv_heads: int | None) -> tuple[dict[str, list], list[str]]:
    """The groups under the names that the table shows, and the names of those in which every rank is alone.

    The two directions of a pipeline have the same ranks, and are one column: `pp`.
    """
    groups = all_groups(degrees, kv_heads)
    several = [name for name in kinds(groups, degrees) if name not in ("world", "pp_backward")]
    alone = [name for name in groups if name not in (*several, "world", "pp_backward")]
    return {name.replace("pp_forward", "pp"): groups[name] for name in several}, [
        name.replace("pp_forward", "pp") for name in alone
    ]


def of_one_rank(rank: int, degrees: Degrees, groups: dict[str, list]) -> list[str]:
    """A line for each of its groups, with all ranks."""
    rows = [["group", "size", "ranks"]]
    for name, of_this_name in groups.items():
        (ranks,) = (each for each in of_this_name if rank in each)
        rows.append([name, f"{len(ranks)}", " ".join(map(str, ranks))])
    width = max(len(row[0]) for row in rows)
    return [f"{name.ljust(width)}  {size:>6}  {ranks}" for name, size, ranks in rows]


def of_all_ranks(degrees: Degrees, groups: dict[str, list], node: int) -> list[str]:
    """A line for each rank: its node, its place in every dimension, and its group of every name."""
    mine = {name: {rank: ranks for ranks in all_of_them for rank in ranks} for name, all_of_them in groups.items()}
    axes = [axis for axis in degrees.axes if getattr(degrees, axis) > 1]
    rows = [["rank", "node", *(f"{axis} rank" for axis in axes), *groups]]
    for rank in range(degrees.world):
        place = coordinates(rank, degrees)
        cells = [f"{rank}", f"{rank // node}", *(f"{place[axis]}" for axis in axes)]
        rows.append(cells + [shortened(mine[name][rank]) for name in groups])
    return aligned(rows)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Do what the module says."""
    parser = OneLineParser(prog="python -m common.groups", description=summary(__doc__))
    parser.add_argument("run", nargs="?", help="folder of a run (--run-dir), whose degrees are taken")
    parser.add_argument("--world", type=int, help="the number of ranks")
    for item in FLAGS:
        if item.name in ASKED:
            kind = (typing.get_args(item.type) or [item.type])[0]
            choices = {"choices": item.metadata["choices"]} if item.metadata["choices"] else {}
            parser.add_argument(
                spelled(item.name), type=kind, default=item.default, help=item.metadata["help"], **choices
            )
    parser.add_argument("--node", type=int, default=NODE, help="ranks of a node (default: %(default)s)")
    parser.add_argument("--rank", type=int, help="show the groups of this rank only, with all their ranks")
    parser.add_argument("--plot", metavar="FILE", help="draw the groups, those of --rank (or 0) in colour, as a PNG")
    options = parser.parse_args(argv)
    given = [spelled(name) for name in ("world", *ASKED) if getattr(options, name) != parser.get_default(name)]
    if options.run and given:
        raise UsageError(f"{options.run} has degrees of its own: leave out {given[0]}")
    if not options.run and options.world is None:
        raise UsageError("how many ranks are there? Say --world N, or name the folder of a run")
    degrees, kv_heads = degrees_of_run(options.run) if options.run else (degrees_asked_for(options), options.kv_heads)
    rank, node = options.rank or 0, options.node
    if not 0 <= rank < degrees.world or node < 1:
        raise UsageError(f"--rank {rank} is none of {degrees.world} ranks" if node > 0 else "--node must be at least 1")
    groups, alone = by_name(degrees, kv_heads)
    if options.plot and not groups:
        raise UsageError(f"--plot {options.plot}: there is nothing to draw, as no rank has another to talk to")
    sizes = " x ".join(f"{axis} {getattr(degrees, axis)}" for axis in degrees.axes)
    print(f"{degrees.world} rank{'s' * (degrees.world > 1)}: {sizes} (the last one turns fastest)")
    lines = of_all_ranks(degrees, groups, node) if options.rank is None else of_one_rank(rank, degrees, groups)
    print(*lines, sep="\n")
    print(f"alone, so that nothing is sent: {', '.join(alone) or 'nowhere'}")
    if degrees.pp > 1:
        print("embed and mirror are those of stages in ascending order; schedules with another placement have others")
    if options.plot:
        print(f"picture: {draw(options.plot, degrees, rank, node)}")


if __name__ == "__main__":
    raise SystemExit(main())
