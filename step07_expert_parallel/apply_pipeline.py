"""What runs the stages of a model with experts, as the flags say."""

from common.config import TrainConfig
from common.model import Decoder
from common.process_groups import Mesh
from step03_zero.zero import Zero
from step05_pipeline import apply_pipeline as step05
from step05_pipeline.pipeline import Pipeline
from step05_pipeline.schedules.actions import Schedule
from step07_expert_parallel.config import takes_turns
from step07_expert_parallel.overlap import OverlappedPipeline


def build_pipeline(
    schedule: Schedule, stages: list[Decoder], zero_wrappers: list[Zero], config: TrainConfig, mesh: Mesh
) -> Pipeline:
    """As in step 5; but DualPipe's pairs of a forward and a backward run as one where tokens travel."""
    kind = OverlappedPipeline if takes_turns(config, schedule) else Pipeline
    return step05.build_pipeline(schedule, stages, zero_wrappers, config, mesh, kind)
