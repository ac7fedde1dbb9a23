"""What the experiments of this step share: small models, dense and with experts, and a training step to look into."""

from functools import partial

from common.experiments import training_step
from common.experiments.even_routing import choose_in_turn
from common.experiments.training_step import checked
from common.model import Decoder
from common.process_groups import Mesh
from step07_expert_parallel.apply_experts import routers_of
from step08_5d import train

STEP = {"step_name": "step08_5d"}  # a configuration of no step, or of an earlier one, refuses experts

# Eight layers, heads and experts: each dimension can divide the model by 8
DENSE = STEP | {"layers": 8, "hidden": 128, "ffn": 256, "heads": 8, "kv_heads": 8, "vocab": 512, "seq_len": 128}
DENSE |= {"micro_batch": 1, "global_batch": 8, "data": "synthetic", "warmup": 1}
EXPERTS = DENSE | {"experts": 8, "top_k": 2, "expert_ffn": 128, "balance": "none"}

FOUR_D = {"pp": 2, "cp": 2, "tp": 2}  # of 8 ranks
FIVE_D = FOUR_D | {"ep": 4}  # with experts


class Training(training_step.Training):
    """What train.py builds on these ranks, and its `train_step`. Has `pipeline` beside what all steps have."""

    def __init__(self, mesh: Mesh, **flags):
        super().__init__(train, *checked(mesh, **flags))
        self.pipeline = self.parts[0]


def route_evenly(stages: list[Decoder]) -> None:
    """From now on, experts are chosen in turn."""
    for _, router in routers_of(stages):
        router.choose = partial(choose_in_turn, router)
