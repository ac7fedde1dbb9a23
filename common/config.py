"""What is trained and how: `TrainConfig`, and the rules for single flags; each step's config.py has those for several.

`TrainConfig` has one field per command-line flag: `--seq-len` is `seq_len`. A field's metadata name the step that
introduces the flag, since each step knows only its own flags and those of earlier steps, and the flag's role: whoever
has to tell flags apart asks `flag_names` for the roles it means.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass, field

from common.counts import count_parameters
from common.errors import UsageError
from common.link import Link
from common.model_config import LatentShape, ModelConfig
from common.presets import resolve

ROLES = {
    "model": "what is trained; the shape that results is `TrainConfig.model_config`",
    "data": "which tokens every step sees",
    "update": "how the gradient of a step changes the weights",
    "layout": "where, in which pieces and in which order a step is computed: only rounding may depend on it",
    "logging": "how long the run takes, what it records and which hardware it simulates: no number depends on it",
}
MOST_PARAMETERS = 10**13  # a larger model is a typing error
DTYPES = ("float32", "bfloat16", "float16", "float64")
FP8 = ("none", "naive", "tensor", "delayed", "row", "tile", "mx")
CP_MODES, CP_SPLITS = ("ring", "allgather", "ulysses"), ("zigzag", "contiguous", "striped")
MAY_BE_ZERO = ("warmup", "weight_decay", "clip", "experts", "shared_experts", "dense_layers", "aux_coef", "mtp")


def flag(default, step: int, role: str, help: str, choices: tuple = ()):
    """A dataclass field that is also a command-line flag of step number `step` and all later ones."""
    return field(default=default, metadata={"step": step, "role": role, "help": help, "choices": choices})


def spelled(name: str) -> str:
    """The flag that sets the field `name`: `--seq-len` for `seq_len`."""
    return "--" + name.replace("_", "-")


@dataclass
class TrainConfig:
    """The configuration of one training run, a field per flag; `resolve_and_check` refuses what no step can run."""

    step_name: str = ""  # the step whose command line this is; not a flag

    model: str = flag("debug", 1, "model", "preset, Hugging Face config file or folder, or Hub name")
    layers: int | None = flag(None, 1, "model", "replace the preset's number of layers")
    hidden: int | None = flag(None, 1, "model", "replace the preset's hidden width")
    heads: int | None = flag(None, 1, "model", "replace the preset's number of attention heads")
    kv_heads: int | None = flag(None, 1, "model", "replace the preset's K/V heads (1: MQA; below --heads: GQA)")
    latent: str | None = flag(None, 1, "model", "latent attention (MLA): Q,KV,NOPE,ROPE,VALUE, its ranks and widths")
    ffn: int | None = flag(None, 1, "model", "replace the preset's SwiGLU width")
    vocab: int | None = flag(None, 1, "model", "replace the preset's vocabulary size")
    tie_embeddings: bool | None = flag(None, 1, "model", "use the embedding matrix as the output head too")
    init_from: str | None = flag(None, 1, "model", "start from Hugging Face weights (folder or Hub name)")
    dtype: str = flag("float32", 1, "model", "type of parameters and activations", DTYPES)

    data: str | None = flag(None, 1, "data", "text, JSONL, parquet, Hub name, synthetic (default: Python's library)")
    tokenizer: str | None = flag(None, 1, "data", "Hugging Face name or path (default: bytes, as ByT5)")
    seq_len: int = flag(256, 1, "data", "tokens per sequence")
    global_batch: int = flag(8, 1, "data", "sequences per optimizer step, over all ranks and micro-batches")
    seed: int = flag(0, 1, "data", "seed of the initial weights and of the order of the data")

    optimizer: str = flag("adamw", 1, "update", "update rule", ("adamw", "sgd"))
    lr: float = flag(1e-3, 1, "update", "learning rate after warm-up")
    warmup: int = flag(10, 1, "update", "steps over which the learning rate rises linearly")
    weight_decay: float = flag(0.1, 1, "update", "decay of weight matrices (norms have none)")
    clip: float = flag(1.0, 1, "update", "clip the global gradient norm to this value (0: do not clip)")

    micro_batch: int = flag(2, 1, "layout", "sequences per forward pass of one rank")
    attention: str = flag("fused", 1, "layout", "attention; only naive keeps the scores", ("fused", "naive"))
    recompute: str = flag("none", 1, "layout", "what the backward repeats", ("none", "selective", "full"))

    steps: int = flag(100, 1, "logging", "optimizer steps")
    device: str = flag("auto", 1, "logging", "auto takes CUDA if there is a GPU", ("auto", "cpu", "cuda"))
    timeout: float = flag(600.0, 1, "logging", "seconds after which an incomplete collective is an error")
    run_dir: str | None = flag(None, 1, "logging", "folder for metrics.jsonl, trace.json, checkpoints/, ...")
    log_to: str | None = flag(None, 1, "logging", "show the record on a dashboard, too", ("tensorboard", "wandb"))
    save_every: int = flag(0, 1, "logging", "write a checkpoint every so many steps (0: never)")
    keep: int = flag(0, 1, "logging", "keep only so many of the newest complete checkpoints (0: keep all)")
    async_save: bool = flag(False, 1, "logging", "write checkpoints in the background, from a copy")
    resume: str | None = flag(None, 1, "logging", "continue from this checkpoint (auto: --run-dir's newest)")
    trace: str | None = flag(None, 1, "logging", "FIRST:LAST, the steps to trace (LAST is included)")
    profile: bool = flag(False, 1, "logging", "also run torch.profiler over the traced steps")
    memory_snapshot: bool = flag(False, 1, "logging", "the CUDA allocator's history of the traced steps")
    measure_memory: bool = flag(False, 1, "logging", "record peak memory on the CPU too (slower)")
    peak_tflops: float | None = flag(None, 1, "logging", "a device's peak in --dtype (default: known or measured)")
    link: str | None = flag(None, 1, "logging", "ALPHA_US,GB_PER_S: let messages cross such a link")
    compute: float | None = flag(None, 1, "logging", "GFLOP/s of products and attention, simulated")

    dp: int | None = flag(None, 2, "layout", "data-parallel degree (default: what remains of the world size)")
    dp_mode: str = flag("bucket", 2, "layout", "when gradients are reduced", ("naive", "overlap", "bucket"))
    bucket_mb: float = flag(25.0, 2, "layout", "MB (10^6 bytes) of a gradient bucket (ZeRO-3: a layer)")
    zero: int = flag(0, 3, "layout", "shards: 1 optimizer states, 2 gradients too, 3 weights too", (0, 1, 2, 3))
    zero_replicas: int = flag(1, 3, "layout", "hybrid sharding: so many copies, each over dp x cp / copies ranks")
    zero_reduce: str = flag("micro-batch", 3, "layout", "when stages 2 and 3 reduce gradients", ("micro-batch", "step"))
    tp: int = flag(1, 4, "layout", "tensor parallelism: ranks that share every layer")
    sequence_parallel: bool = flag(True, 4, "layout", "with --tp: split norms and residuals too (default)")
    tp_mode: str = flag("overlap", 4, "layout", "collectives alone or behind matmuls", ("plain", "overlap", "chunked"))
    pp: int = flag(1, 5, "layout", "pipeline parallelism: ranks that the layers are divided among")
    schedule: str = flag("1f1b", 5, "layout", "order of the pipeline's work (afab, interleaved, zb-h1, dualpipe, ...)")
    virtual_stages: int | None = flag(None, 5, "layout", "stages per pipeline rank (default: the schedule's)")
    schedule_file: str | None = flag(None, 5, "layout", "a schedule of your own, a CSV file")
    consecutive: int | None = flag(None, 5, "layout", "--schedule llama3: micro-batches in a row on one stage")
    cp: int = flag(1, 6, "layout", "context parallelism: ranks that share every sequence")
    cp_mode: str = flag("ring", 6, "layout", "how attention sees other ranks' keys and values", CP_MODES)
    cp_split: str = flag("zigzag", 6, "layout", "which tokens of a sequence a rank holds", CP_SPLITS)
    mask_documents: bool = flag(False, 6, "data", "attention sees no other document (slow on GPUs: many small kernels)")
    experts: int | None = flag(None, 7, "model", "experts of a layer, between which a router chooses (0: dense)")
    top_k: int | None = flag(None, 7, "model", "experts per token (default: the preset's, or 2)")
    shared_experts: int | None = flag(None, 7, "model", "further experts that all tokens pass through")
    dense_layers: int | None = flag(None, 7, "model", "so many layers come first that have no experts")
    expert_ffn: int | None = flag(None, 7, "model", "SwiGLU width of one expert (default: the preset's, or --ffn)")
    gate: str | None = flag(None, 7, "model", "how the router scores experts", ("softmax", "sigmoid"))
    expert_groups: int | None = flag(None, 7, "model", "divide the experts into groups, for --node-limit")
    node_limit: int | None = flag(None, 7, "model", "groups that the experts of one token may belong to")
    balance: str = flag("aux", 7, "update", "what keeps the experts equally busy", ("none", "aux", "bias"))
    aux_coef: float = flag(0.01, 7, "update", "--balance aux: coefficient of the auxiliary loss")
    bias_rate: float = flag(1e-3, 7, "update", "--balance bias: how far a step moves an expert's bias")
    z_coef: float = flag(0.0, 7, "update", "coefficient of the z-loss, which keeps the router's logits small")
    capacity_factor: float = flag(0.0, 7, "update", "drop what exceeds so many equal shares (0: nothing)")
    ep: int = flag(1, 7, "layout", "expert parallelism: ranks that the experts are divided among")
    mtp: int | None = flag(None, 8, "model", "1: one more block predicts the token after the next one")
    mtp_weight: float = flag(0.3, 8, "update", "--mtp: weight of its loss beside that of the next token")
    fused: bool = flag(True, 8, "layout", "fused kernels: all on CUDA, head with loss everywhere (default)")
    own_attention: bool = flag(False, 8, "layout", "on CUDA, our own kernels for attention as well")
    compile: bool = flag(False, 8, "layout", "compile norms, rotation, activation where no kernel does")
    fp8: str = flag("none", 8, "model", "multiply in FP8; what shares a scale (naive: nothing is scaled)", FP8)
    fp8_gradients: str = flag("e4m3", 8, "model", "--fp8: the format of gradients", ("e4m3", "e5m2"))
    fp8_dispatch: bool = flag(False, 8, "model", "--fp8: tokens travel to their experts in FP8")
    fp8_gather: bool = flag(False, 8, "layout", "--fp8, --zero 3: weights are gathered in FP8")
    moments: str = flag("float32", 8, "update", "type in which AdamW's moments are stored", ("float32", "bfloat16"))
    order: str = flag("tp,cp,pp,dp", 8, "layout", "how the degrees are laid over the ranks, from near to far")
    shapes: bool = flag(False, 8, "logging", "print (and draw) a layer's shapes, bytes and messages")
    layer_delay: float = flag(0.0, 5, "logging", "a layer's forward takes at least so many ms, its backward twice that")

    @functools.cached_property
    def model_config(self) -> ModelConfig:
        """The preset or file that --model names, with the replacements of --layers, --heads and so on."""
        preset, names = resolve(self.model), {field.name: field.name for field in dataclasses.fields(ModelConfig)}
        names["groups_per_token"] = "node_limit"
        changes = {ours: value for ours, name in names.items() if (value := getattr(self, name, None)) is not None}
        if self.latent is not None:
            changes["latent"] = LatentShape.parse(self.latent)
        if preset.latent or self.latent:
            changes["kv_heads"] = changes.get("kv_heads", changes.get("heads", preset.heads))
        if "heads" in changes and "kv_heads" not in changes:  # the preset's K/V heads belong to the preset's heads
            changes["kv_heads"] = math.gcd(preset.kv_heads, changes["heads"])
        if "heads" in changes or "hidden" in changes:
            changes["head_dim"] = None
        if self.experts and not preset.experts:  # a single gate is not normalized, or the loss could not change it
            changes = {"top_k": min(2, self.experts), "expert_ffn": self.ffn or preset.ffn} | changes
            changes["normalize_gates"] = changes["top_k"] > 1
        return dataclasses.replace(preset, **changes)

    @property
    def torch_dtype(self):
        """The torch.dtype of parameters and activations."""
        import torch  # here, so that printing --help does not wait for it

        return getattr(torch, self.dtype)

    @property
    def link_model(self) -> Link | None:
        """The simulated link, or None. Raises UsageError when --link does not describe one."""
        return None if self.link is None else Link.parse(self.link)

    @property
    def trace_range(self) -> tuple[int, int] | None:
        """The first and the last traced step, or None. Raises UsageError when --trace names no range."""
        if self.trace is None:
            return None
        first, separator, last = self.trace.partition(":")
        if not (separator and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise UsageError(f"--trace {self.trace} is not FIRST:LAST, such as 3:5")
        return int(first), int(last)

    @property
    def rank_seq_len(self) -> int:
        """Tokens of each sequence that a rank works on; sequence parallelism divides them once more."""
        return self.seq_len // self.cp

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step: a linear warm-up, then constant."""
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup))

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per optimizer step on one rank: global_batch / (micro_batch * dp)."""
        return self.global_batch // (self.micro_batch * (self.dp or 1))

    def resolve_and_check(self, world_size: int) -> None:
        """Fill in `dp`. Raises UsageError, with flag, value and rule, for what cannot run on `world_size` ranks."""
        self._check_numbers()
        self._check_model()
        if self.step_name == "step01_single_gpu" and world_size > 1:
            raise UsageError(f"{self.step_name} is one process, not {world_size}; step02_data_parallel takes several")
        given = [f"--{name} {size}" for name in ("tp", "cp", "pp") if (size := getattr(self, name)) > 1]
        rule, given = ("divide", given) if self.dp is None else ("equal", [*given, f"--dp {self.dp}"])
        self.dp = self.dp or max(1, world_size // (self.tp * self.cp * self.pp))
        if self.tp * self.cp * self.pp * self.dp != world_size:
            raise UsageError(f"{' x '.join(given)} does not {rule} the world size {world_size}")

    def check_device(self, kind: str) -> None:
        """Raises UsageError for a flag that means nothing on this kind of device, "cpu" or "cuda"."""
        if self.memory_snapshot and kind == "cpu":
            raise UsageError("--memory-snapshot records the CUDA allocator, and this run is on the CPU")
        for name in ("link", "compute", "layer_delay"):
            if (value := getattr(self, name)) and kind == "cuda":
                raise UsageError(f"{spelled(name)} {value} lets Python wait, which no GPU notices: use --device cpu")

    def _check_numbers(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value >= 1 << 63:  # PyTorch takes none of these, and float() not all
                raise UsageError(f"{spelled(name)} {value:,} must be below 2^63")
            if type(value) in (int, float):
                zero = name in MAY_BE_ZERO or getattr(TrainConfig, name) == 0  # by default
                rule = "at least 0" if zero else "at least 1" if type(value) is int else "positive"
                if not (math.isfinite(value) and (value > 0 or value == 0 and zero)):
                    raise UsageError(f"{spelled(name)} {value} must be {rule}")
        if self.timeout > 1e6:
            raise UsageError(f"--timeout {self.timeout} must be at most 1e6 seconds")

    def _check_model(self) -> None:
        model, name = self.model_config, f"--model {self.model}"
        model.check()
        if (total := count_parameters(model).total) > MOST_PARAMETERS:
            raise UsageError(f"{name} has {total:,} parameters, more than {MOST_PARAMETERS:,}")
        if model.experts and self.step_name < f"step{self.__dataclass_fields__['experts'].metadata['step']:02}":
            raise UsageError(f"{name} has experts, which this step does not train")
        if model.mtp and self.step_name < f"step{self.__dataclass_fields__['mtp'].metadata['step']:02}":
            raise UsageError(f"{name} predicts a second token, which this step does not train")
        if self.seq_len > model.max_positions:
            raise UsageError(f"--seq-len {self.seq_len} exceeds the {model.max_positions} positions of {name}")


def flag_names(*roles: str) -> tuple[str, ...]:
    """The names of all fields of `TrainConfig` whose flag has one of these `ROLES`, in the order of the fields."""
    chosen = {role: ROLES[role] for role in roles}  # KeyError for what is none
    return tuple(item.name for item in dataclasses.fields(TrainConfig) if item.metadata.get("role") in chosen)
