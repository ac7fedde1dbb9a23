"""The rules that the flags of tensor parallelism obey, after those of step 3."""

from common.config import TrainConfig
from common.errors import UsageError
from step03_zero import config as step03


def check(config: TrainConfig) -> None:
    """As in step 3. Moreover, every rank has equally many heads, columns and tokens."""
    step03.check(config)
    model, tp = config.model_config, config.tp
    for name, size in (("heads", model.heads), ("ffn", model.ffn)):
        if size % tp:
            raise UsageError(f"--tp {tp} does not divide --{name} {size}")
    if model.kv_heads % tp and tp % model.kv_heads:
        raise UsageError(f"--tp {tp} and --kv-heads {model.kv_heads}: one must divide the other")
    if config.sequence_parallel and config.rank_seq_len % tp:
        tokens = f"--seq-len {config.seq_len}" + f" / --cp {config.cp}" * (config.cp > 1)
        raise UsageError(f"--tp {tp} does not divide {tokens}, as sequence parallelism needs")
    if config.tp_mode == "chunked" and not config.sequence_parallel:
        raise UsageError("--tp-mode chunked splits gathers along the sequence: it needs --sequence-parallel")
