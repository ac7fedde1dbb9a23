"""The rules that the flags of ZeRO obey, after those of step 2."""

from common.config import TrainConfig
from common.errors import UsageError
from step02_data_parallel import config as step02


def check(config: TrainConfig) -> None:
    """As in step 2. Moreover, copies are of equal size, and flags of one stage are not given to another."""
    step02.check(config)
    if config.dp * config.cp % config.zero_replicas:
        ranks = f"dp {config.dp}" + f" x cp {config.cp}" * (config.cp > 1)
        raise UsageError(f"--zero-replicas {config.zero_replicas} does not divide {ranks}")
    if not config.zero and config.zero_replicas > 1:
        raise UsageError(f"--zero-replicas {config.zero_replicas} needs --zero 1, 2 or 3")
    if config.zero and config.dp_mode != "bucket":
        raise UsageError(f"--dp-mode {config.dp_mode} needs --zero 0; stages 1 to 3 work on buckets")
    if config.zero < 2 and config.zero_reduce != "micro-batch":
        raise UsageError(f"--zero-reduce {config.zero_reduce} needs --zero 2 or 3; others reduce once a step anyway")
