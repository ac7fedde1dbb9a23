"""The memory calculator: what a training step would hold, in our model and in the playbook's GPT.

    python -m step01_single_gpu.memory_model --model llama3-8b --seq-len 4096 --micro-batch 1 --dtype bfloat16

It takes the flags of step 1's train.py, prints a table, and needs neither the memory nor the time to train.
"""

import sys
from collections import Counter

import common.entry  # noqa: F401
from common.config import TrainConfig
from common.counts import count_parameters
from common.launching.command_line import one_line_errors, parse
from common.layers import at_least_float32
from step01_single_gpu.config import check
from step01_single_gpu.cost import saved_activations, states
from step01_single_gpu.memory_model import gpt as gpt_memory
from step01_single_gpu.memory_model.peak import predict_peak

STATES = ("parameters", "gradients", "float32 gradient sums", "master weights", "moments")
ACTIVATIONS = ("attention", "scores", "mlp", "norms", "layer inputs", "embedding", "head", "log-probabilities")


def breakdown(config: TrainConfig) -> tuple[Counter, Counter]:
    """Return the bytes per row of the table for one micro-batch of `config`: our model's and those of a GPT like it."""
    model, dtype, batch, seq = config.model_config, config.torch_dtype, config.micro_batch, config.seq_len
    ours = Counter(states(model, dtype, config.optimizer))
    if dtype != at_least_float32(dtype):  # each narrow gradient is dropped at once: what is held are their sums
        ours["float32 gradient sums"] = ours.pop("gradients")
    for saved in saved_activations(model, batch, seq, dtype, config.attention, config.recompute):
        ours[saved.part] += saved.bytes
    gpt, mixed = gpt_memory.from_model(model), dtype.itemsize == 2
    theirs = Counter(gpt_memory.states(gpt.parameters, mixed))
    for part, size in gpt_memory.layer_activations(gpt, batch, seq, mixed, config.recompute).items():
        theirs[part] = gpt.layers * size
    return ours, theirs + Counter(gpt_memory.head_activations(gpt, batch, seq, mixed))


def print_table(config: TrainConfig) -> None:
    """Print the bytes of both models row by row, their sums, and when our step needs the most memory."""
    model, columns = config.model_config, breakdown(config)
    counts = count_parameters(model).total, gpt_memory.from_model(model).parameters
    print(
        f"{config.model}: micro-batches of {config.micro_batch} x {config.seq_len} tokens, {config.dtype}, "
        f"{config.attention} attention, recompute {config.recompute}"
    )
    print(f"{'':26}{'this project':>16}{'playbook (GPT)':>16}")
    print(f"{'number of parameters':26}{counts[0]:16,}{counts[1]:16,}")

    def line(name: str, *sizes: int) -> None:
        print(f"{name:26}" + "".join(f"{_readable(size):>16}" for size in sizes))

    for row in (*STATES, *ACTIVATIONS):
        if any(column[row] for column in columns):
            line(row, *(column[row] for column in columns))
    held = [sum(column[row] for row in STATES) for column in columns]
    line("all but activations", *held)
    print(f"{'  bytes per parameter':26}" + "".join(f"{each / count:16.2f}" for each, count in zip(held, counts)))
    line("activations", *(sum(column[row] for row in ACTIVATIONS) for column in columns))
    line("sum", *(column.total() for column in columns))
    shape = (model, config.micro_batch, config.seq_len, config.torch_dtype, config.attention, config.recompute)
    peak = predict_peak(*shape, config.optimizer, config.accumulation_steps)
    print(f"\npeak of a step in this project: {_readable(peak.peak)} (from the second step on)")
    line("  start of the backward", peak.loss)
    line("  worst layer of it", peak.layers)
    line("  optimizer step", peak.update)
    line("  between two steps", peak.idle)


def _readable(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Print the table for the command line `argv`."""
    config = parse(1, argv)
    micro_batch = max(1, config.micro_batch)
    config.global_batch = -(-config.global_batch // micro_batch) * micro_batch  # any micro-batch may be asked for
    config.resolve_and_check(1)
    check(config)
    print_table(config)


if __name__ == "__main__":
    sys.exit(main())
