"""The rules that the flags of all five dimensions obey, after those of step 7."""

from common.config import TrainConfig
from common.errors import UsageError
from step07_expert_parallel import config as step07


def check(config: TrainConfig) -> None:
    """As in step 7. Moreover, the order of the dimensions names each of them."""
    if sorted(config.order.split(",")) != ["cp", "dp", "pp", "tp"]:
        raise UsageError(f"--order {config.order} must name tp, cp, pp and dp, each once, separated by commas")
    step07.check(config)
