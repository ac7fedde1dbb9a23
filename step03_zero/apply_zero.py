"""ZeRO for the model of these steps: which of its parts are regions, and what the flags choose."""

from torch import nn

from common.config import TrainConfig
from common.model import Decoder
from common.process_groups import Mesh
from step01_single_gpu.initial_weights import initial_values
from step03_zero.by_layer import ZeroByLayer
from step03_zero.zero import Zero


def regions_of(model: Decoder) -> list[list[nn.Module]]:
    """The embedding, each layer, and what follows the layers: those that this model has."""
    parts = dict(model.named_children())
    embedding, layers = parts.pop("embedding", None), parts.pop("layers")
    rest = [part for part in parts.values() if next(part.parameters(), None) is not None]
    regions = [[embedding] if embedding else [], *([layer] for layer in layers.values()), rest]
    return [region for region in regions if region]


def kind_of(config: TrainConfig) -> type[Zero]:
    """Stage 3 gathers layer by layer. But in a pipeline micro-batches take turns on the layers, and each turn would
    gather them again: there all weights of the stage stay until the update.
    """
    return ZeroByLayer if config.zero == 3 and config.pp == 1 else Zero


def apply_zero(
    model: Decoder,
    config: TrainConfig,
    mesh: Mesh,
    kind: type[Zero] | None = None,
    regions: list[list[nn.Module]] | None = None,
) -> Zero:
    """Give a model on the meta device its initial values, sharded as the flags say."""
    return (kind or kind_of(config))(
        model,
        regions or regions_of(model),
        initial_values(config),
        mesh,
        config.zero,
        dtype=config.torch_dtype,
        mode=config.dp_mode,
        bucket_mb=config.bucket_mb,
        each_micro_batch=config.zero_reduce == "micro-batch",
    )
