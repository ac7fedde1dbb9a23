"""The batch recipe: from tokens per step and a number of GPUs to micro-batch, parallel degree and accumulation.

    python -m step02_data_parallel.batch_recipe --model llama3-1b --tokens-per-batch 4e6 --gpus 128
    python -m step02_data_parallel.batch_recipe --model llama3-8b --gpus 512 --micro-batch 2

The order of decisions is that of The Ultra-Scale Playbook, "Our journey up to now": choose a global batch in tokens, a
sequence length and the largest micro-batch that fits one GPU, use all GPUs for data parallelism, and accumulate as many
micro-batches as the global batch needs. Can the backward of the last one then hide the all-reduce of the gradients?

Bandwidths, in 10^9 bytes per second, are NCCL's bus bandwidth: an all-reduce of K bytes counts as 2(N-1)/N K.
"""

import argparse
import math
import sys
from dataclasses import dataclass

import common.entry  # noqa: F401

# isort: split
import torch

from common.config import DTYPES
from common.costs.hardware import H100_TFLOPS
from common.costs.networks import BUS_GB_PER_S, bus_bandwidth
from common.counts import count_parameters
from common.errors import UsageError
from common.launching.command_line import OneLineParser, one_line_errors
from common.model_config import ModelConfig
from common.presets import resolve
from step01_single_gpu.cost import states
from step01_single_gpu.memory_model.peak import predict_peak
from step02_data_parallel.cost import exposed_share, printed_ratio, tokens_to_hide

# ---- how large a micro-batch -----------------------------------------------------------------------------------------


def largest_micro_batch(
    model: ModelConfig, seq_len: int, memory_bytes: float, dtype: torch.dtype, recompute: str = "none"
) -> int:
    """Return the sequences of the largest micro-batch whose predicted peak fits `memory_bytes`; 0 if not even 1 does.

    The playbook tries until memory runs out, this asks step 1's account. Our gradient buckets stay allocated between
    steps, as the sums do there with `accumulation=2`.
    """

    def fits(batch: int) -> bool:
        peak = predict_peak(model, batch, seq_len, dtype, recompute=recompute, accumulation=2).peak
        return peak <= memory_bytes

    if not fits(1):
        return 0
    fitting, too_large = 1, 2
    while fits(too_large):
        fitting, too_large = too_large, 2 * too_large
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        fitting, too_large = (middle, too_large) if fits(middle) else (fitting, middle)
    return fitting


# ---- how to fill the global batch ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How a global batch is filled; `wanted` is the number of sequences asked for."""

    wanted: float
    dp: int
    micro_batch: int
    accumulation: int

    @property
    def samples(self) -> int:  # the multiple of micro_batch x dp that is nearest to `wanted`
        return self.micro_batch * self.accumulation * self.dp

    @property
    def ratio(self) -> float:
        """Micro-batches per GPU before rounding; clearly below 1, there are more GPUs than data parallelism can use."""
        return self.wanted / (self.micro_batch * self.dp)


def fill(tokens_per_batch: float, seq_len: int, gpus: int, micro_batch: int) -> Recipe:
    """Use all `gpus` for data parallelism, and accumulate (at least 1 micro-batch) until the global batch is full."""
    wanted = tokens_per_batch / seq_len
    return Recipe(wanted, gpus, micro_batch, max(1, round(wanted / (micro_batch * gpus))))


# ---- the command -----------------------------------------------------------------------------------------------------


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    """Print the recipe. Returns the exit status."""
    defaults_shown = argparse.ArgumentDefaultsHelpFormatter
    parser = OneLineParser(prog="python -m step02_data_parallel.batch_recipe", formatter_class=defaults_shown)
    add = parser.add_argument
    add("--model", default="llama3-8b", help="preset, Hugging Face configuration or Hub name")
    add("--tokens-per-batch", type=float, default=4e6, metavar="N", help="tokens per optimizer step")
    add("--seq-len", type=int, default=4096, metavar="N", help="tokens per sequence")
    add("--gpus", type=int, default=128, metavar="N", help="all of them data parallel")
    add("--memory-gib", type=float, default=80.0, metavar="GIB", help="memory of a GPU, in 2^30 bytes")
    add("--micro-batch", type=int, metavar="N", help="sequences, instead of the largest that fits")
    add("--dtype", default="bfloat16", choices=DTYPES, help="of parameters and activations")
    add("--recompute", default="none", choices=("none", "selective", "full"), help="activations computed again")
    add("--gradient-bytes", type=int, default=4, help="bytes per gradient in the all-reduce (our buckets: 4)")
    add("--peak-tflops", type=float, default=H100_TFLOPS, metavar="X", help="of one GPU")
    add("--bandwidth", type=float, metavar="GB/S", help="of the all-reduce (default: from the table)")
    options = parser.parse_args(argv)
    for name, value in vars(options).items():
        if isinstance(value, int | float) and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"--{name.replace('_', '-')} {value} must be positive")
    model = resolve(options.model)
    model.check()
    if model.experts:
        raise UsageError(f"--model {options.model} has experts, which the memory account of step 1 leaves out")
    micro_batch = _choose_micro_batch(model, options)
    if micro_batch is None:
        return 1
    recipe = fill(options.tokens_per_batch, options.seq_len, options.gpus, micro_batch)
    samples, dp = recipe.samples, recipe.dp
    print(
        f"global batch   {samples:,} sequences x {options.seq_len:,} = {samples * options.seq_len:,} tokens"
        f" ({options.tokens_per_batch:,.0f} tokens were asked for: {recipe.wanted:,.1f} sequences)"
    )
    print(f"data parallel  {dp} ranks, one per GPU")
    print(f"accumulation   {samples:,} / ({micro_batch} x {dp}) = {recipe.accumulation} per rank and step")
    if recipe.ratio < 0.9:
        _gpu_rich(recipe, options.seq_len)
    _overlap(model, recipe, options)
    return 0


def _choose_micro_batch(model: ModelConfig, options: argparse.Namespace) -> int | None:
    """Print what fits, and return the micro-batch to take: the given one, or the largest power of two; else None."""
    dtype, limit = getattr(torch, options.dtype), options.memory_gib * 2**30
    count, held = count_parameters(model).total, sum(states(model, dtype).values())
    largest = largest_micro_batch(model, options.seq_len, limit, dtype, options.recompute)
    print(f"model          {options.model}: {count / 1e9:.2f} B parameters, {options.dtype}")
    print(f"states         {held / 2**30:.1f} GiB: parameters, gradients, optimizer, the same on every rank")
    fits = f"at most {largest} fits" if largest else "not even 1 fits"
    print(f"micro-batch    {fits} {options.memory_gib:g} GiB with recomputation {options.recompute}", end="")
    if options.micro_batch is not None:
        print(f"; {options.micro_batch} was given")
        return options.micro_batch
    if not largest:
        if largest_micro_batch(model, options.seq_len, limit, dtype, "full"):
            print(": --recompute full would do")
        elif held < limit:
            print(": what one sequence needs beside them is too large, even with --recompute full")
        else:
            print(": data parallelism makes no state smaller")
        print("               (--micro-batch N goes on regardless)")
        return None
    chosen = 1 << largest.bit_length() - 1  # a power of two divides the usual global batches
    print(f"; {chosen} is taken" if chosen < largest else "")
    return chosen


def _gpu_rich(recipe: Recipe, seq_len: int) -> None:
    """There are more GPUs than the batch has micro-batches: print what can be changed."""
    print(f"GPU-rich       only {recipe.ratio:.2f} micro-batches per GPU were asked for. Choose among:")
    smaller = int(recipe.wanted // recipe.dp)
    if smaller:
        print(f"  - a micro-batch of {smaller}: less memory, but smaller and so less efficient matrix products")
    ranks = max(1, round(recipe.wanted / recipe.micro_batch))
    print(f"  - {ranks} data-parallel ranks, the other GPUs into another dimension (tensor, context, pipeline)")
    print(f"  - a larger batch, as above: {recipe.samples * seq_len:,} tokens, if the training bears it")


def _overlap(model: ModelConfig, recipe: Recipe, options: argparse.Namespace) -> None:
    """Print both forms of the overlap condition, and the tokens that hide the all-reduce at each bandwidth."""
    dp, peak, beta = recipe.dp, options.peak_tflops * 1e12, options.gradient_bytes
    tokens = recipe.micro_batch * options.seq_len
    bandwidth = options.bandwidth * 1e9 if options.bandwidth else bus_bandwidth("all_reduce", dp)
    ratio = tokens_to_hide(dp, bandwidth, peak, beta) / tokens
    printed = printed_ratio(count_parameters(model).total, tokens, dp, bandwidth, peak)
    share = exposed_share(ratio, recipe.accumulation)
    verdict = "hidden" if ratio <= 1 else f"exposed for {share:.0%} of the step"
    print(f"\nDoes the backward of the last micro-batch ({tokens:,} tokens per GPU) hide the all-reduce?")
    print(f"  at {bandwidth / 1e9:.1f} GB/s, {peak / 1e12:g} TFLOP/s and {beta} bytes per gradient")
    print(f"  all-reduce / backward = {beta} (DP-1) peak / (2 DP tokens bandwidth) = {ratio:.2f}: {verdict}")
    print(f"  (the playbook prints Ψ (DP-1) peak / (2 DP tokens bandwidth) = {printed:.1e}; Ψ cancels)")
    print(f"\n  tokens per GPU that hide it, with 2 and with {beta} bytes per gradient:")
    for gpus, measured in BUS_GB_PER_S["all_reduce"].items():
        two, ours = (tokens_to_hide(gpus, measured * 1e9, peak, each) for each in (2, beta))
        print(f"  {gpus:>6} GPUs at {measured:>5.1f} GB/s {two:>8,.0f} {ours:>8,.0f}")
    print("  Bandwidths: the playbook's own measurement on H100 nodes (medians). That peak is assumed; a")
    print("  model that reaches half of it computes twice as long, and half as many tokens do.")


if __name__ == "__main__":
    sys.exit(main())
