"""Draw a schedule, or write it for the runtime of torch.distributed.pipelining.

    python -m step05_pipeline.schedules --schedule 1f1b --pp 4 --micro-batches 8 --out 1f1b.png
    python -m step05_pipeline.schedules --schedule zbv --pp 4 --micro-batches 8 --export-torch zbv.csv

The command prints the schedule as text, how long it takes, how much of that is waiting, and what it holds in memory.
Costs are those of 1/p of the model, however many stages a rank has, so that schedules can be compared.
"""

import sys

from common.errors import UsageError
from common.launching.command_line import OneLineParser, one_line_errors
from step05_pipeline.schedules.actions import Schedule
from step05_pipeline.schedules.catalogue import SCHEDULES, build_schedule
from step05_pipeline.schedules.further.csv_files import read_schedule
from step05_pipeline.schedules.further.torch_files import write_torch_csv
from step05_pipeline.schedules.simulator import Costs, simulate
from step05_pipeline.schedules.timeline import draw, summary, text
from step05_pipeline.schedules.validator import check_schedule


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Draw one schedule."""
    parser = OneLineParser(prog="python -m step05_pipeline.schedules")
    add = parser.add_argument
    add("--schedule", default="1f1b", help=f"{', '.join(SCHEDULES)} (default: %(default)s)")
    add("--schedule-file", metavar="FILE", help="a schedule of your own, CSV")
    add("--pp", type=int, default=4, metavar="N", help="ranks (default: %(default)s)")
    add("--micro-batches", type=int, default=8, metavar="N", help="of a step (default: %(default)s)")
    add("--virtual-stages", type=int, metavar="N", help="stages on each rank")
    add("--consecutive", type=int, metavar="N", help="for --schedule llama3: micro-batches on a stage at a time")
    costs = "of 1/pp of the model; also B, FB; and communication, of a message (default: %(default)s)"
    add("--costs", default="F=1,I=1,W=1", help=costs)
    add("--out", metavar="PNG", help="where to draw it")
    add("--export-torch", metavar="CSV", help="where to write it for torch.distributed.pipelining")
    options = parser.parse_args(argv)
    sizes = options.pp, options.micro_batches, options.virtual_stages
    if options.schedule_file:
        schedule = read_schedule(options.schedule_file, *sizes)
    else:
        schedule = build_schedule(options.schedule, *sizes, options.consecutive)
    check_schedule(schedule)
    timeline = simulate(schedule, parse_costs(options.costs, schedule))
    print(f"{text(timeline)}\n\n{summary(timeline)}")
    if options.out:
        title = f"{schedule.name}: {timeline.makespan:.4g}, of which bubble {timeline.bubble:.4g}"
        print(f"drawn in {draw({title: timeline}, options.out, 'time, in the unit of --costs')}")
    if options.export_torch:
        try:
            write_torch_csv(schedule, options.export_torch)
        except OSError as error:
            raise UsageError(f"--export-torch {options.export_torch}: {error.strerror}") from None
        print(f"written in {options.export_torch}, for _PipelineScheduleRuntime._load_csv")


def parse_costs(given: str, schedule: Schedule) -> Costs:
    """The costs of the schedule's stages from `F=1,I=1,W=1`, which are those of 1/p of the model. Raises UsageError."""
    numbers = {"F": 1.0, "I": 1.0, "W": 1.0}  # unless given
    for part in given.split(","):
        name, _, value = part.partition("=")
        try:
            numbers[name.strip()] = float(value)
        except ValueError:
            raise UsageError(f"--costs {given}: {part!r} is not NAME=NUMBER") from None
    if unknown := numbers.keys() - {"F", "I", "W", "B", "FB", "communication"}:
        raise UsageError(f"--costs {given}: {min(unknown)!r} is none of F, I, W, B, FB, communication")
    factor = schedule.ranks / schedule.stages  # of these costs in one stage; a message has the same size everywhere
    costs = Costs(**{name: cost * (1 if name == "communication" else factor) for name, cost in numbers.items()})
    if max(numbers.values()) > 1000 * min(cost for name, cost in numbers.items() if name != "communication"):
        raise UsageError(f"--costs {given}: a cost may be at most 1,000 times that of an action")  # to be drawn
    return costs


if __name__ == "__main__":
    sys.exit(main())
