"""Memory of the playbook's GPT in every dimension, as its widget computes it and as it should be.

The widget (behind the playbook's treemap) knows tensor and data parallelism; its six mistakes are marked (1) to (6).
What is right divides what each dimension divides, and adds pipelines, contexts and float32 sums of gradients.
"""

from dataclasses import dataclass, replace

from common.model_config import ModelConfig
from step01_single_gpu.memory_model import gpt
from step01_single_gpu.memory_model.gpt import GptShape
from step08_5d.cost import Layout

KINDS = ("parameters", "gradients", "optimizer state", "activations")


@dataclass(frozen=True)
class Kind:
    """What the playbook's plots do not say of a model or of its training, with their defaults."""

    mlp: str = "gelu"
    gradients: int = 2  # bytes per parameter: 2, or 6 with float32 sums
    optimizer: int = 8  # 8 in the plots (two moments), 12 with master weights


def of_model(model: ModelConfig) -> tuple[GptShape, Kind]:
    """The GPT nearest to a Llama: its widths and SwiGLU, without grouped heads, with the widths of our training."""
    return replace(gpt.from_model(model), ffn=model.ffn), Kind("swiglu", gradients=4, optimizer=12)


def widget(shape: GptShape, layout: Layout, kind: Kind = Kind()) -> dict[str, float]:
    """Bytes of a rank by kind, as the widget computes them; sequence parallelism is on if tp is more than 1."""
    b, s, sp = layout.micro_batch, layout.seq, layout.tp
    parts = gpt.layer_activations(shape, b, s, True, layout.recompute, kind.mlp)
    if layout.recompute == "full":
        layer = parts["layer inputs"]  # (3) not divided by t
    else:
        layer = parts.pop("scores", 0) + sum(parts.values()) / sp  # (1) scores are not divided by t
    head = sum(gpt.head_activations(shape, b, s).values()) / sp  # (4) with plain tp the logits would be whole
    parameters = (
        shape.parameters + shape.hidden * s
    )  # (2) whole on every rank; (6) an MLP of 8 h^2; positions are learned
    widths = {"parameters": 2, "gradients": 2, "optimizer state": 12}  # (5) no float32 sums of gradients
    result = {
        name: width * parameters / (layout.dp if layout.zero >= stage else 1)
        for (name, width), stage in zip(widths.items(), (3, 2, 1))
    }
    return result | {"activations": shape.layers * layer + head}


def parameters(shape: GptShape, mlp: str, layers: float, ends: tuple[bool, bool]) -> float:
    """h v for either end of the model, and (4 h^2 + 2 or 3 h f + 13 h) per layer."""
    h, f = shape.hidden, shape.ffn or 4 * shape.hidden
    matrices = 4 * h * h + (3 if mlp == "swiglu" else 2) * h * f
    return layers * (matrices + 13 * h) + sum(ends) * h * shape.vocab + (2 * h if ends[1] else 0)


def right(shape: GptShape, layout: Layout, kind: Kind = Kind(), stage: int = 0) -> dict[str, float]:
    """Bytes of a rank of a stage by kind, under 1F1B: every activation is divided by tp and cp, weights by tp and pp.

    Where there is one stage, embedding and head are one matrix, as in the playbook's GPT.
    """
    last = stage == layout.pp - 1
    ends = (stage == 0, last and layout.pp > 1)
    count = parameters(shape, kind.mlp, shape.layers / layout.pp, ends) + (2 * shape.hidden if layout.pp == 1 else 0)
    widths = {"parameters": 2, "gradients": kind.gradients, "optimizer state": kind.optimizer}
    result = {
        name: width * count / layout.tp / (layout.copies if layout.zero >= first else 1)
        for (name, width), first in zip(widths.items(), (3, 2, 1))
    }
    seq = layout.seq // layout.cp
    layer = gpt.layer_activations(shape, layout.micro_batch, seq, True, layout.recompute, kind.mlp)
    if "scores" in layer:
        layer["scores"] *= layout.cp  # of a rank's queries with the keys of all
    kept = shape.layers / layout.pp * min(layout.pp - stage, layout.micro_batches) * sum(layer.values())
    head = sum(gpt.head_activations(shape, layout.micro_batch, seq).values()) if last else 0
    return result | {"activations": (kept + head) / layout.tp}
