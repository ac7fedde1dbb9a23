"""The rules that the flags of every run obey."""

from common.config import TrainConfig, spelled
from common.errors import UsageError
from step01_single_gpu.running.dashboards import check_installed

# A flag, and another one without which it means nothing
NEEDS = {"save_every": "run_dir", "trace": "run_dir", "profile": "trace", "memory_snapshot": "trace"}
NEEDS |= {"keep": "save_every", "async_save": "save_every", "log_to": "run_dir"}


def check(config: TrainConfig) -> None:
    """Raises UsageError, with flag, value and rule, for flags that do not fit together. `dp` has been filled in."""
    for name, value in vars(config).items():
        if value == "" and name != "step_name":  # of an empty shell variable, say
            raise UsageError(f"{spelled(name)} is empty")
    if config.global_batch % config.micro_batch:
        raise UsageError(f"--global-batch {config.global_batch} is not divisible by --micro-batch {config.micro_batch}")
    if config.data == "synthetic" and config.tokenizer:
        raise UsageError(f"--tokenizer {config.tokenizer} has no text to work on: --data synthetic is made of ids")
    config.link_model  # noqa: B018 (raises UsageError for what it cannot parse)
    if config.trace_range and config.trace_range[0] >= config.steps:
        raise UsageError(f"--trace {config.trace} begins after the last step of --steps {config.steps}")
    for name, needed in NEEDS.items():
        if getattr(config, name) and not getattr(config, needed):
            raise UsageError(f"{spelled(name)} needs {spelled(needed)}, which is missing")
    if config.log_to:
        check_installed(config.log_to)
    if config.resume == "auto" and not config.run_dir:
        raise UsageError("--resume auto searches --run-dir, which is missing")
    if config.profile and config.measure_memory:
        raise UsageError("--profile and --measure-memory both need PyTorch's profiler; choose one of them")
