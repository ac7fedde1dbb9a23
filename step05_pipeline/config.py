"""The schedule that the flags of pipelines ask for, and the rules that they obey, after those of step 4."""

from common.config import TrainConfig
from common.errors import UsageError
from step04_tensor_parallel import config as step04
from step05_pipeline.schedules.actions import Schedule
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.further.csv_files import read_schedule
from step05_pipeline.schedules.validator import check_schedule


def schedule_of(config: TrainConfig) -> Schedule:
    """The schedule that the flags ask for. Raises UsageError if there is none."""
    sizes = config.pp, config.accumulation_steps, config.virtual_stages
    if config.schedule_file:
        if config.schedule != TrainConfig.schedule or config.consecutive:
            raise UsageError("--schedule-file replaces --schedule and --consecutive; leave them out")
        return read_schedule(config.schedule_file, *sizes)
    return build_schedule(config.schedule, *sizes, config.consecutive)


def check(config: TrainConfig) -> None:
    """As in step 4. Moreover, there is a layer for every stage, and all ranks of the schedule come to its end."""
    step04.check(config)
    layers = config.model_config.layers
    if (stages := config.pp * (config.virtual_stages or 1)) > layers:
        raise UsageError(f"--pp {config.pp} with {stages} stages in all needs as many --layers, not {layers}")
    schedule = schedule_of(config)
    if schedule.stages > layers:
        raise UsageError(
            f"--schedule {schedule.name} on --pp {config.pp} has {schedule.stages} stages, more than --layers {layers}"
        )
    if len(schedule.placement) > 1 and config.zero > 1:
        raise UsageError(
            f"--zero {config.zero}: --schedule {schedule.name} keeps two copies of the model, or more, whose "
            "gradients are summed whole; it runs with --zero 0 or 1"
        )
    check_schedule(schedule)
