"""The rules that the flags of context parallelism obey, after those of step 5."""

from common.config import TrainConfig
from common.errors import UsageError
from step05_pipeline import config as step05


def check(config: TrainConfig) -> None:
    """As in step 5. Moreover, sequences, or heads, can be divided among the context-parallel ranks."""
    step05.check(config)
    cp, model, tp = config.cp, config.model_config, config.tp
    if config.seq_len % cp:
        raise UsageError(f"--cp {cp} does not divide --seq-len {config.seq_len}")
    if config.cp_split == "zigzag" and cp > 1 and config.seq_len % (2 * cp):
        parts = f"--cp {cp} --cp-split zigzag makes {2 * cp} parts"
        raise UsageError(f"{parts}, which does not divide --seq-len {config.seq_len}")
    if config.cp_mode == "ulysses":
        heads, kv_heads, of = model.heads // tp, max(1, model.kv_heads // tp), f" / --tp {tp}" * (tp > 1)
        if heads % cp:
            raise UsageError(f"--cp {cp} --cp-mode ulysses does not divide --heads {model.heads}{of}")
        if kv_heads % cp and cp % kv_heads:
            kv = f"--kv-heads {model.kv_heads}{of}"
            raise UsageError(f"--cp {cp} --cp-mode ulysses and {kv}: one must divide the other")
