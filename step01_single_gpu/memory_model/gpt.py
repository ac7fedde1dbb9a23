"""The memory formulas of The Ultra-Scale Playbook, for its own GPT (LayerNorm, biases, GELU, dropout, tied head).

Two sources that agree where they overlap: the formulas of the text (activations after Korthikanti et al.,
arXiv:2205.05198, section 4) and the finer ones behind the playbook's memory widget, which also know float32,
other MLPs and the head. Symbols: b sequences, s tokens each, h hidden width, a heads, L layers, v vocabulary,
f MLP width (4h). All results are bytes. `cost.py`, next door, counts the model that this project trains.
"""

from dataclasses import dataclass

from common.model_config import ModelConfig

MLP_KINDS = ("gelu", "relu", "swiglu")


@dataclass(frozen=True)
class GptShape:
    """The numbers that the playbook's formulas know; `ffn` None means 4 * hidden."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    ffn: int | None = None

    @property
    def parameters(self) -> int:
        """h v + L (12 h^2 + 13 h) + 2 h. The widget adds h s for learned positions."""
        h = self.hidden
        return h * self.vocab + self.layers * (12 * h * h + 13 * h) + 2 * h


def from_model(model: ModelConfig) -> GptShape:
    """The GPT that the playbook's plots put in a Llama's place: same h, L, a, v, but f = 4h and no GQA."""
    return GptShape(model.vocab, model.hidden, model.layers, model.heads)


def states(parameters: int, mixed: bool = True, float32_gradients: bool = True) -> dict[str, int]:
    """Bytes of parameters, gradients, master weights and Adam's moments: 16 or, with `float32_gradients`, 20 each.

    Full float32 (not `mixed`) is 4 + 4 + 0 + 8 = 16 as well: mixed precision does not save any of these.
    """
    if not mixed:
        return {"parameters": 4 * parameters, "gradients": 4 * parameters, "moments": 8 * parameters}
    result = {"parameters": 2 * parameters, "gradients": 2 * parameters}
    if float32_gradients:
        result["float32 gradient sums"] = 4 * parameters
    return result | {"master weights": 4 * parameters, "moments": 8 * parameters}


def text_activations(shape: GptShape, batch: int, seq: int, recompute: str = "none") -> int:
    """The text's formula, half precision: L s b h (34 + 5 a s / h); selective L s b h 34; full L s b h 2."""
    sbh = seq * batch * shape.hidden
    scores = 5 * shape.heads * seq * seq * batch
    return shape.layers * {"none": 34 * sbh + scores, "selective": 34 * sbh, "full": 2 * sbh}[recompute]


def layer_activations(
    shape: GptShape, batch: int, seq: int, mixed: bool = True, recompute: str = "none", mlp: str = "gelu"
) -> dict[str, int]:
    """The widget's formula for one layer, by part: 11 + 5 a s / h + 19 + 4 times s b h in half precision, GELU.

    The 1s are dropout masks. Full recomputation keeps the layer's input and nothing else.
    """
    value = 2 if mixed else 4  # bytes
    sbh, sbf = seq * batch * shape.hidden, seq * batch * (shape.ffn or 4 * shape.hidden)
    if recompute == "full":
        return {"layer inputs": value * sbh}
    wide = {"relu": 1, "gelu": 2, "swiglu": 4}[mlp]  # tensors of width f that are kept
    result = {"attention": (5 * value + 1) * sbh}  # input of q/k/v, q, k, v, input of the projection; a mask
    if recompute == "none":  # softmax, dropped-out softmax; a mask
        result["scores"] = (2 * value + 1) * shape.heads * seq * seq * batch
    return result | {"mlp": value * sbh + wide * value * sbf + sbh, "norms": 2 * value * sbh}


def head_activations(shape: GptShape, batch: int, seq: int, mixed: bool = True) -> dict[str, int]:
    """What the widget adds once: embedding dropout, final norm, projection input, float32 cross-entropy."""
    value, sbh = 2 if mixed else 4, seq * batch * shape.hidden
    return {"embedding": sbh, "head": 2 * value * sbh, "log-probabilities": 4 * seq * batch * shape.vocab}
