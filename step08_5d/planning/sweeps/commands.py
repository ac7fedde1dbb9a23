"""Real runs of many layouts, and rates that are fitted to them."""

from argparse import ArgumentParser, Namespace

from common.launching.system import SESSIONS, require
from step08_5d.planning.command_line import Command
from step08_5d.planning.sweeps import sweep as sweeps
from step08_5d.planning.sweeps.sweep import STATES


def add_file(parser: ArgumentParser) -> None:
    parser.add_argument("file", help="a TOML file that says what to run, such as step08_5d/planning/laptop.toml")


def add_sweep_flags(parser: ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument("--again", nargs="+", choices=STATES, default=[], help="repeat runs that ended so")


def sweep(options: Namespace) -> None:
    """Real runs of many layouts that a file asks for, one after the other, and what became of each."""
    from step08_5d.planning.sweeps import pictures

    require("a sweep", SESSIONS)
    asked = sweeps.read(options.file)
    records = sweeps.carry_out(asked, options.again)
    pictures.print_records(asked.name, records)
    if any(each["status"] == "ok" for each in records):
        print(f"  figure: {pictures.draw_heat(records, asked.folder / 'heat.png')}")


def add_calibrate_flags(parser: ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument(
        "--judge", help="another TOML file of a sweep: fit to all runs of FILE, judge on those of this one"
    )


def calibrate(options: Namespace) -> None:
    """What this machine needs for a FLOP, an operation, a byte: fitted to some runs of a sweep, judged on others."""
    from step08_5d.planning.sweeps import calibration_report  # here, as dry runs import all that trains

    calibration_report.show(options)


SWEEP, CALIBRATE = Command(add_sweep_flags, sweep), Command(add_calibrate_flags, calibrate)
