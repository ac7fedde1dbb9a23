"""When a training step of our model needs the most memory, and how much, from the configuration alone."""

from dataclasses import dataclass

import torch

from common.counts import count_parameters
from common.layers import at_least_float32
from common.model_config import ModelConfig
from step01_single_gpu.cost import layer_activations, saved_activations, states, total_bytes


@dataclass(frozen=True)
class Peak:
    """Bytes alive at the three moments of a step that can be its peak, and between two steps."""

    idle: int  # between two steps
    loss: int  # the loss's backward begins: all activations, and two more tensors as large as the logits
    layers: int  # the worst layer of the backward
    update: int  # the optimizer steps

    @property
    def peak(self) -> int:
        return max(self.loss, self.layers, self.update)


def predict_peak(
    model: ModelConfig,
    batch: int,
    seq: int,
    dtype: torch.dtype,
    attention: str = "fused",
    recompute: str = "none",
    optimizer: str = "adamw",
    accumulation: int = 1,
    first_step: bool = False,
) -> Peak:
    """Predict the peak of a step on our model: exact for states and activations, an estimate for temporaries.

    Args:
        accumulation: micro-batches; from the second one on, the sums of all gradients are held during the forward.
        first_step: the moments of Adam do not exist before the first update.
    """
    high, count = at_least_float32(dtype), count_parameters(model)
    held = states(model, dtype, optimizer)
    shape = (model, batch, seq, dtype, attention)
    saved = saved_activations(*shape, recompute)
    fixed = held["parameters"] + held["master weights"]
    base = fixed + (0 if first_step else held["moments"])
    kept = held["gradients"] if accumulation > 1 else 0
    logits = batch * seq * model.vocab * high.itemsize
    loss = base + kept + total_bytes(saved) + 2 * logits

    # Layer by layer, last first: what the layers below keep, the gradients so far, the layer at its worst
    layer_kept = total_bytes(layer_activations(*shape, recompute))
    layer_count = count.attention + count.dense_mlp + 2 * model.hidden
    made, mlp_made = model.vocab * model.hidden * high.itemsize, 3 * model.hidden * model.ffn * high.itemsize
    below = total_bytes(saved) - total_bytes(saved, "head", "log-probabilities") - layer_kept
    in_mlp, in_core = _inside_a_layer(*shape, recompute)
    layers = 0
    for _ in range(model.layers):
        worst = max(max(kept, made + mlp_made // 3) + in_mlp, max(kept, made + mlp_made) + in_core)
        layers = max(layers, base + below + worst)
        below, made = below - layer_kept, made + layer_count * high.itemsize
    return Peak(base, loss, layers, fixed + held["gradients"] + held["moments"])


def _inside_a_layer(
    model: ModelConfig, batch: int, seq: int, dtype: torch.dtype, attention: str, recompute: str
) -> tuple[int, int]:
    """Bytes of activations and their gradients alive in a layer's backward: in its MLP, and in its attention core."""
    high, tokens = at_least_float32(dtype), batch * seq
    residual = tokens * model.hidden * dtype.itemsize
    shape = (model, batch, seq, dtype, attention)
    whole = layer_activations(*shape, "none" if recompute == "full" else recompute)
    # Gradients of down.input, silu and up; down.input itself is gone. A recomputed layer has its output once more.
    mlp = total_bytes(whole) + 2 * tokens * model.ffn * dtype.itemsize
    mlp += (2 if recompute == "full" else 1) * residual
    kept = layer_activations(*shape, "none")
    core = total_bytes(kept, "attention", "scores") + total_bytes(kept, "norms") // 2
    core -= residual  # o_proj.input is gone
    if recompute == "selective":  # the inputs of the region, beside what the core keeps when it runs again
        core += (1 + 2 * model.kv_heads / model.heads) * residual
    scores = batch * model.heads * seq * seq if attention == "naive" else 0
    core += 2 * scores * high.itemsize  # gradients of probabilities and of scores
    return mlp, int(core + 2 * residual)
