"""The rules that the flags of data parallelism obey, after those of step 1."""

from common.config import TrainConfig
from common.errors import UsageError
from step01_single_gpu import config as step01


def check(config: TrainConfig) -> None:
    """As in step 1. Moreover, all ranks have equally many micro-batches."""
    step01.check(config)
    if config.global_batch % (config.micro_batch * config.dp):
        parts = f"--micro-batch {config.micro_batch} x dp {config.dp}"
        raise UsageError(f"--global-batch {config.global_batch} is not divisible by {parts}")
