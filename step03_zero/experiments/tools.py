"""What the experiments of this step share: the sizes of its units, and train.py's step with another kind of `Zero`."""

from collections.abc import Callable
from types import SimpleNamespace

from common.config import TrainConfig
from common.experiments.runs import BUCKET_MB, MODEL
from common.experiments.training_step import Training, checked
from common.model import Decoder
from common.process_groups import Mesh
from step01_single_gpu.mixed_precision import Optimizer
from step03_zero import train
from step03_zero.apply_zero import apply_zero
from step03_zero.by_layer import ZeroByLayer
from step03_zero.zero import Zero

STAGES = (0, 1, 2, 3)
SHAPE = MODEL | {"seq_len": 64, "micro_batch": 1, "bucket_mb": BUCKET_MB}


def regions_of(model: Decoder) -> list[list[int]]:
    """Return the indices of the parameters of each region: the embedding, each layer, the final norm with the head."""
    regions = {}
    for index, (name, _) in enumerate(model.named_parameters()):
        part, _, rest = name.partition(".")
        key = rest.partition(".")[0] if part == "layers" else "embedding" if part == "embedding" else "norm and head"
        regions.setdefault(key, []).append(index)
    return list(regions.values())


def units_of(flags: dict) -> tuple[int, ...]:
    """Return the elements of stage 3's units for these flags, from the shape of the model alone."""
    model = Decoder(TrainConfig(**flags).model_config)
    elements = [parameter.numel() for parameter in model.parameters()]
    return tuple(sum(elements[index] for index in region) for region in regions_of(model))


def run_with(mesh: Mesh, flags: dict, zero: type[Zero] | None = None, regions: Callable | None = None) -> Training:
    """On a rank: the training step of these flags, if wanted with another kind of `Zero`, and regions of one's own.

    regions: the model -> lists of its modules.
    """

    def build(config: TrainConfig, mesh: Mesh) -> tuple[Decoder, Zero, Optimizer]:
        model = Decoder(config.model_config)
        sharded = apply_zero(model, config, mesh, zero, regions and regions(model))
        return model, sharded, Optimizer(sharded.shards, config.torch_dtype, config.weight_decay, config.optimizer)

    step = SimpleNamespace(**vars(train) | {"build": build}) if zero else train
    return Training(step, *checked(mesh, **flags))


class NoPrefetch(ZeroByLayer):
    """Stage 3 in which every region waits for its own gather."""

    def _prefetch(self, region) -> None:
        pass
