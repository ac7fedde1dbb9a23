"""The rules that the flags of all five dimensions obey, after those of step 7."""

from common.config import TrainConfig
from common.errors import UsageError
from step07_expert_parallel import config as step07
from step08_5d.narrow_numbers.scaling import BLOCKS


def check(config: TrainConfig) -> None:
    """As in step 7. Moreover, the order of the dimensions names each of them, and no flag means nothing."""
    if sorted(config.order.split(",")) != ["cp", "dp", "pp", "tp"]:
        raise UsageError(f"--order {config.order} must name tp, cp, pp and dp, each once, separated by commas")
    step07.check(config)
    if not config.model_config.mtp and config.mtp_weight != TrainConfig.mtp_weight:
        raise UsageError(f"--mtp-weight {config.mtp_weight} needs --mtp 1")
    check_low_precision(config)


def check_low_precision(config: TrainConfig) -> None:
    """Narrow moments and FP8 have what they need, and no cut falls into the middle of what shares a scale."""
    if config.moments != TrainConfig.moments and (config.optimizer == "sgd" or config.dtype == "float16"):
        needed = "--optimizer adamw" if config.optimizer == "sgd" else "another --dtype than float16, which skips steps"
        raise UsageError(f"--moments {config.moments} needs {needed}")
    if config.fp8 == "none" and config.fp8_gradients != TrainConfig.fp8_gradients:
        raise UsageError(f"--fp8-gradients {config.fp8_gradients} needs one of --fp8")
    if config.fp8_dispatch and (config.fp8 == "none" or not config.model_config.experts):
        raise UsageError("--fp8-dispatch needs --experts, and one of --fp8")
    given, model, tp = f"--fp8 {config.fp8}", config.model_config, config.tp
    if config.fp8_gather and (config.fp8 == "none" or config.zero < 3):
        raise UsageError("--fp8-gather needs --zero 3, and one of --fp8")
    if config.fp8_gather and config.fp8 in ("row", "mx"):
        raise UsageError(f"--fp8-gather: {given} casts a weight differently in the backward, so it would travel twice")
    if config.fp8_gather and config.dtype == "float16":
        raise UsageError("--fp8-gather: --dtype float16 cannot hold the smallest numbers of FP8 with their scales")
    if tp > 1 and config.tp_mode == "chunked" and config.fp8 in ("tensor", "row"):
        raise UsageError(f"{given} wants the largest number of a whole tensor, before --tp-mode chunked has all parts")
    if config.fp8 != "none" and model.kv_heads < tp:
        raise UsageError(
            f"{given}: --tp {tp} exceeds --kv-heads {model.kv_heads}, and ranks with copies of a head "
            "would each round their summand of its gradient"
        )
    if config.fp8 != "none" and model.latent and config.cp > 1 and config.cp_mode != "ulysses":
        raise UsageError(
            f"{given}: --cp-mode {config.cp_mode} multiplies latents part by part, and scales are those of all parts: "
            "latent attention needs --cp-mode ulysses"
        )
    everyone = config.tp * config.cp
    if model.experts and config.ep % everyone and config.fp8 not in ("none", "naive", "delayed"):
        raise UsageError(
            f"{given}: --ep {config.ep} must be a multiple of tp {tp} x cp {config.cp}, so that an expert "
            "sees whole sequences, and its scales are those of all its tokens"
        )
    if not (size := BLOCKS.get(config.fp8)):
        return
    widths = {"--heads": model.heads // tp * model.head_width, "--ffn": model.ffn // tp}
    widths["--kv-heads"] = model.kv_heads // tp * model.head_width
    if model.latent:
        widths["--latent's VALUE"] = model.heads // tp * model.latent.value_dim
        widths["--latent's NOPE and VALUE"] = model.heads // tp * model.latent.pair_width
    for name, width in widths.items():
        if tp > 1 and width % size:
            raise UsageError(
                f"{given}: --tp {tp} cuts {name} into parts of {width} columns, not of whole blocks of {size}"
            )
    if config.cp > 1 and config.cp_split == "striped":
        raise UsageError(f"{given} wants {size} tokens in a row on one rank, which --cp-split striped separates")
    # Layers whose weights are whole see the part of the sequence that a tensor rank has
    shared = model.experts and model.shared_experts or model.mtp or model.latent and config.sequence_parallel
    chunks = config.cp * (2 if config.cp > 1 and config.cp_split == "zigzag" else 1), config.cp * (tp if shared else 1)
    for parts in chunks:
        if parts > 1 and config.seq_len // parts % size:
            tokens = f"--seq-len {config.seq_len} into {parts} parts"
            raise UsageError(f"{given}: the layout cuts {tokens}, not of whole blocks of {size} tokens")
