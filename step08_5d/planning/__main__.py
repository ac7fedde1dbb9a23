"""Find a layout: what fits, what it costs, what to run. Everything that is printed is predicted.

python -m step08_5d.planning plan --model llama3-8b --gpus 64 --seq-len 4096 --tokens-per-batch 1M
python -m step08_5d.planning memory --model llama3-70b --dp 4 --tp 8 --pp 2 --zero 1 --recompute full
python -m step08_5d.planning memory --model llama3-8b --layer
python -m step08_5d.planning compare --model llama3-8b "--dp 8 --zero 3" "--dp 4 --tp 2 --zero 1"
python -m step08_5d.planning bars
python -m step08_5d.planning overlap --model llama3-8b --dp 8 --tp 8 --pp 4 --peak 989 --bandwidth 450
python -m step08_5d.planning dry-run --world 16384 --rank 77 --model llama3-405b --tp 8 --pp 16 --dtype bfloat16
python -m step08_5d.planning sweep step08_5d/planning/laptop.toml
python -m step08_5d.planning calibrate step08_5d/planning/laptop.toml
python -m step08_5d.planning published
python -m step08_5d.planning page --model llama3-8b --gpus 64 --seq-len 4096 --tokens-per-batch 1M
"""

import re
import sys

import common.entry  # noqa: F401
from common.config import spelled
from common.launching.command_line import FLAGS, OneLineParser, one_line_errors, summary
from step08_5d.planning import compare, plan
from step08_5d.planning.dry_run import command as dry_run
from step08_5d.planning.memory import report as memory
from step08_5d.planning.page import write
from step08_5d.planning.published import bars
from step08_5d.planning.published import report as published
from step08_5d.planning.sweeps.commands import CALIBRATE, SWEEP
from step08_5d.planning.time import overlap

COMMANDS = {"plan": plan.COMMAND, "compare": compare.COMMAND, "page": write.COMMAND, "memory": memory.COMMAND}
COMMANDS |= {"dry-run": dry_run.COMMAND, "overlap": overlap.COMMAND, "sweep": SWEEP, "calibrate": CALIBRATE}
COMMANDS |= {"published": published.COMMAND, "bars": bars.COMMAND}

OF_STEP_8 = {spelled(item.name) for item in FLAGS}


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command that the command line names."""
    parser = OneLineParser(prog="python -m step08_5d.planning", description=summary(__doc__))
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        more = "Other flags are those of step 8." if command.takes_more else None
        words = summary(command.run.__doc__)
        command.add_flags(parsers.add_parser(name, allow_abbrev=False, epilog=more, help=words, description=words))
    options, options.rest = parser.parse_known_args(argv)
    command = COMMANDS[options.command]
    flags_of = {name: re.findall(r"--[\w-]+", each.format_usage()) for name, each in parsers.choices.items()}
    for flag in (word for word in options.rest if word not in OF_STEP_8):
        if takers := [name for name, flags in flags_of.items() if flag in flags]:
            parser.error(f"{flag} is not a flag of {options.command}, but of {', '.join(takers)}")
    if options.rest and not command.takes_more:
        hint = command.hint if OF_STEP_8 & {word.split("=")[0] for word in options.rest} else ""
        parser.error(f"unknown: {' '.join(options.rest)}{hint}")
    command.run(options)


if __name__ == "__main__":
    sys.exit(main())
