"""What is trained and how: `TrainConfig` and every rule that makes a combination valid.

`TrainConfig` has one field per command-line flag (`--seq-len` is `seq_len`); `common/command_line.py` makes the parser
from it. A field's metadata names the step that introduces the flag, so that a step knows its own flags and those of the
steps before it, and no others.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass, field

from common.counts import count_parameters
from common.errors import UsageError
from common.model_config import ModelConfig
from common.presets import resolve

MOST_PARAMETERS = 10**13  # more than that is a typing error
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Link:
    """A simulated slower link: a message of n bytes takes `alpha + n / bandwidth` seconds at least."""

    alpha: float  # seconds
    bandwidth: float  # bytes per second


def flag(default, step: int, help: str, choices: tuple = ()):
    """A dataclass field that is also a command-line flag, known from `step` on."""
    return field(default=default, metadata={"step": step, "help": help, "choices": choices})


@dataclass
class TrainConfig:
    """One training run. Every field is a flag; `validate` refuses what does not fit together."""

    step_name: str = ""  # the step whose command line this is; no flag

    model: str = flag("debug", 1, "preset, Hugging Face config file or folder, or Hub name")
    layers: int | None = flag(None, 1, "replace the preset's number of layers")
    hidden: int | None = flag(None, 1, "replace the preset's hidden width")
    heads: int | None = flag(None, 1, "replace the preset's attention heads")
    kv_heads: int | None = flag(None, 1, "replace the preset's key/value heads (fewer than --heads: GQA; 1: MQA)")
    ffn: int | None = flag(None, 1, "replace the preset's SwiGLU width")
    vocab: int | None = flag(None, 1, "replace the preset's vocabulary size")
    tie_embeddings: bool | None = flag(None, 1, "share the embedding matrix with the head")
    init_from: str | None = flag(None, 1, "start from Hugging Face weights (folder or Hub name)")

    seq_len: int = flag(256, 1, "tokens a sequence")
    micro_batch: int = flag(2, 1, "sequences a forward pass of one rank")
    global_batch: int = flag(8, 1, "sequences an optimizer step, over all ranks and micro-batches")
    steps: int = flag(100, 1, "optimizer steps")
    optimizer: str = flag("adamw", 1, "update rule", ("adamw", "sgd"))
    lr: float = flag(1e-3, 1, "learning rate after warm-up")
    warmup: int = flag(10, 1, "steps over which the learning rate rises linearly")
    weight_decay: float = flag(0.1, 1, "decay of weight matrices (never of norms)")
    clip: float = flag(1.0, 1, "clip the global gradient norm to this (0: do not clip)")
    seed: int = flag(0, 1, "seed of the initial weights and of the order of the data")

    dtype: str = flag("float32", 1, "type of parameters and activations", DTYPES)
    attention: str = flag("fused", 1, "attention core: naive keeps the scores, fused does not", ("fused", "naive"))
    recompute: str = flag("none", 1, "activations to compute again in the backward", ("none", "selective", "full"))
    data: str | None = flag(
        None, 1, "text, JSONL or parquet path, Hub dataset, 'synthetic' (default: CPython's library)"
    )
    tokenizer: str | None = flag(None, 1, "Hugging Face tokenizer, name or path (default: bytes, as ByT5)")

    device: str = flag("auto", 1, "auto takes CUDA where there is a GPU", ("auto", "cpu", "cuda"))
    timeout: float = flag(600.0, 1, "seconds after which a collective that does not complete is an error")
    run_dir: str | None = flag(None, 1, "folder for config.json, metrics.jsonl, trace.json and checkpoints/")
    save_every: int = flag(0, 1, "write a checkpoint every so many steps (0: never)")
    keep: int = flag(0, 1, "remove older checkpoints once so many newer ones are complete (0: keep all)")
    async_save: bool = flag(False, 1, "write checkpoints in the background, from a copy in CPU memory")
    resume: str | None = flag(None, 1, "go on from a checkpoint: its path, or 'auto' for the newest of --run-dir")
    trace: str | None = flag(None, 1, "FIRST:LAST, the steps to trace into trace.json (LAST is included)")
    profile: bool = flag(False, 1, "also run torch.profiler over the traced steps")
    memory_snapshot: bool = flag(False, 1, "also write the CUDA allocator's history of the traced steps")
    measure_memory: bool = flag(False, 1, "on CPU, read peak memory from allocator events at every step (slower)")
    peak_tflops: float | None = flag(None, 1, "peak of one device for MFU (default: table of GPUs, or measured)")
    link: str | None = flag(None, 1, "ALPHA_US,GB_PER_S: pretend that every message crosses such a link")

    dp: int | None = flag(None, 2, "data-parallel degree (default: what remains of the world size)")
    dp_mode: str = flag("bucket", 2, "when gradients are reduced", ("naive", "overlap", "bucket"))
    bucket_mb: float = flag(25.0, 2, "MB (10^6 bytes) of a gradient bucket (in ZeRO stage 3 it is a layer)")

    zero: int = flag(0, 3, "ZeRO: shard the optimizer (1), also gradients (2), also parameters (3)", (0, 1, 2, 3))
    zero_replicas: int = flag(1, 3, "hybrid sharding: keep so many copies, each sharded over dp / copies ranks")
    zero_reduce: str = flag(
        "micro-batch",
        3,
        "when stages 2 and 3 reduce-scatter gradients",
        ("micro-batch", "step"),
    )

    tp: int = flag(1, 4, "tensor parallelism: ranks that share every layer")
    sequence_parallel: bool = flag(True, 4, "with --tp: split norms and residuals along the sequence")
    tp_mode: str = flag(
        "overlap", 4, "collectives as single operators, behind matmuls, or in chunks", ("plain", "overlap", "chunked")
    )

    pp: int = flag(1, 5, "pipeline parallelism: ranks that the layers are divided among")
    schedule: str = flag("1f1b", 5, "order of the pipeline's work (afab, interleaved, zb-h1, dualpipe, ...)")
    virtual_stages: int | None = flag(None, 5, "stages on each pipeline rank (default: what the schedule asks for)")
    schedule_file: str | None = flag(None, 5, "a schedule of your own: CSV, or Python with one registered function")
    consecutive: int | None = flag(
        None, 5, "for --schedule llama3: micro-batches on a stage before the next one's turn"
    )
    layer_delay: float = flag(0.0, 5, "each layer's forward takes at least so many ms, its backward twice that")

    # ---- derived ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def model_config(self) -> ModelConfig:
        """The preset or file named by --model with the single replacements applied."""
        names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tie_embeddings")
        changes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if "heads" in changes and "kv_heads" not in changes:  # the preset's K/V heads belong to the preset's heads
            changes["kv_heads"] = math.gcd(resolve(self.model).kv_heads, changes["heads"])
        if "heads" in changes or "hidden" in changes:
            changes["head_dim"] = None
        return dataclasses.replace(resolve(self.model), **changes)

    @property
    def torch_dtype(self):
        """The torch.dtype of parameters and activations."""
        import torch

        return getattr(torch, self.dtype)

    @property
    def link_model(self) -> Link | None:
        """The simulated link, or None."""
        if self.link is None:
            return None
        try:
            alpha, bandwidth = (float(part) for part in self.link.split(","))
        except ValueError:
            raise UsageError(f"--link {self.link} is not ALPHA_US,GB_PER_S, such as 50,1.5") from None
        if not 0 <= alpha <= 1e9 or not bandwidth > 0:
            raise UsageError(f"--link {self.link}: the latency must lie in 0..1e9 us and the bandwidth be positive")
        return Link(alpha * 1e-6, bandwidth * 1e9)

    @property
    def trace_range(self) -> tuple[int, int] | None:
        """First and last traced step, both included, or None."""
        if self.trace is None:
            return None
        first, separator, last = self.trace.partition(":")
        if not (separator and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise UsageError(f"--trace {self.trace} is not FIRST:LAST, such as 3:5")
        return int(first), int(last)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then constant."""
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup))

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of one rank in an optimizer step: global_batch / (micro_batch * dp)."""
        return self.global_batch // (self.micro_batch * (self.dp or 1))

    # ---- rules ------------------------------------------------------------------------------------------------------

    def resolve_and_check(self, world_size: int) -> None:
        """Raise UsageError for anything that cannot run on `world_size` ranks; fills in `dp`."""
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and not (value >= least and math.isfinite(value)):
                raise UsageError(f"--{name.replace('_', '-')} {value} must be at least {least}")
        for name in ("lr", "timeout", "bucket_mb", "peak_tflops"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise UsageError(f"--{name.replace('_', '-')} {value} must be positive")
        if self.timeout > 1e6:
            raise UsageError(f"--timeout {self.timeout} must be at most 1e6 seconds")
        model = self.model_config
        model.check()
        if (total := count_parameters(model).total) > MOST_PARAMETERS:
            raise UsageError(f"the model would have {total:,} parameters, more than {MOST_PARAMETERS:,}")
        if model.experts:
            raise UsageError(f"--model {self.model} has experts, which this step does not train")
        if self.seq_len > model.max_positions:
            raise UsageError(
                f"--seq-len {self.seq_len} exceeds the {model.max_positions} positions of --model {self.model}"
            )
        if self.step_name == "step01_single_gpu" and world_size > 1:
            raise UsageError(f"{self.step_name} is one process, not {world_size}; step02_data_parallel takes several")
        self._validate_tp()
        stages = self.pp * (self.virtual_stages or 1)
        if stages > model.layers:
            raise UsageError(f"--pp {self.pp} with {stages} stages in all needs as many --layers, not {model.layers}")
        if self.dp is None:
            self.dp = max(1, world_size // (self.tp * self.pp))
        if self.tp * self.pp * self.dp != world_size:
            others = "".join(f"--{name} {getattr(self, name)} x " for name in ("tp", "pp") if getattr(self, name) > 1)
            raise UsageError(f"{others}--dp {self.dp} does not equal the world size {world_size}")
        if self.global_batch % (self.micro_batch * self.dp):
            raise UsageError(
                f"--global-batch {self.global_batch} is not divisible by "
                f"--micro-batch {self.micro_batch} x dp {self.dp}"
            )
        if self.dp % self.zero_replicas:
            raise UsageError(f"--zero-replicas {self.zero_replicas} does not divide dp {self.dp}")
        if not self.zero and self.zero_replicas > 1:
            raise UsageError(f"--zero-replicas {self.zero_replicas} needs --zero 1, 2 or 3")
        if self.zero and self.dp_mode != "bucket":
            raise UsageError(f"--dp-mode {self.dp_mode} needs --zero 0; stages 1 to 3 work on buckets")
        if self.zero < 2 and self.zero_reduce != "micro-batch":
            raise UsageError(f"--zero-reduce {self.zero_reduce} needs --zero 2 or 3; others do so anyway")
        self.link_model  # noqa: B018 (refuses what cannot be parsed)
        if self.trace_range and self.trace_range[0] >= self.steps:
            raise UsageError(
                f"--trace {self.trace} begins after the last of --steps {self.steps}, which is {self.steps - 1}"
            )
        for name in ("save_every", "trace", "profile", "memory_snapshot"):
            if getattr(self, name) and self.run_dir is None:
                raise UsageError(f"--{name.replace('_', '-')} needs --run-dir to write to")
        for name in ("keep", "async_save"):
            if getattr(self, name) and not self.save_every:
                raise UsageError(f"--{name.replace('_', '-')} needs --save-every, which writes checkpoints")
        if (self.profile or self.memory_snapshot) and self.trace is None:
            raise UsageError("--profile and --memory-snapshot cover the steps of --trace FIRST:LAST, which is missing")
        if self.profile and self.measure_memory:
            raise UsageError("--profile and --measure-memory both need PyTorch's profiler; take one of them")
        if self.resume == "auto" and self.run_dir is None:
            raise UsageError("--resume auto looks into --run-dir, which is missing")

    def _validate_tp(self) -> None:
        model = self.model_config
        for name in ("heads", "ffn"):
            if getattr(model, name) % self.tp:
                raise UsageError(f"--tp {self.tp} does not divide --{name} {getattr(model, name)}")
        if model.kv_heads % self.tp and self.tp % model.kv_heads:
            raise UsageError(f"--tp {self.tp} and --kv-heads {model.kv_heads}: one must divide the other")
        if self.tp > 1 and self.sequence_parallel and self.seq_len % self.tp:
            raise UsageError(f"--tp {self.tp} does not divide --seq-len {self.seq_len} (or use --no-sequence-parallel)")
        if self.tp_mode == "chunked" and not self.sequence_parallel:
            raise UsageError("--tp-mode chunked splits gathers along the sequence: it needs --sequence-parallel")


_AT_LEAST = {
    "seq_len": 1,
    "micro_batch": 1,
    "global_batch": 1,
    "steps": 1,
    "warmup": 0,
    "weight_decay": 0,
    "clip": 0,
    "seed": 0,
    "save_every": 0,
    "keep": 0,
    "dp": 1,
    "zero_replicas": 1,
    "tp": 1,
    "pp": 1,
    "virtual_stages": 1,
    "consecutive": 1,
    "layer_delay": 0,
}
