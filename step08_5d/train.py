"""Step 8: the same run in all five dimensions, with fused kernels on a GPU, and in FP8 if you ask for it (`--fp8`).

    torchrun --nproc_per_node 16 step08_5d/train.py --pp 2 --cp 2 --tp 2 --experts 8 --ep 4 --zero 1 --dtype bfloat16
    torchrun --nproc_per_node 8 step08_5d/train.py --pp 2 --cp 2 --tp 2 --dtype bfloat16
    torchrun --nproc_per_node 8 step08_5d/train.py --pp 2 --cp 2 --tp 2 --steps 1 --shapes

The lesson is in step08_5d/README.md. `diff` this file with step07_expert_parallel/train.py to see what it adds.
"""

import common.entry  # noqa: F401 (before torch: one thread per process by default)

# isort: split
import torch

from common import collectives
from common.config import TrainConfig
from common.launching.launch import run
from common.model import Decoder
from common.process_groups import Mesh
from common.tracing.tracer import Tracer
from step01_single_gpu.clipping import clip_factor, gradient_norm
from step01_single_gpu.data.batches import Batches, load_batches
from step01_single_gpu.memory_model.capacity import check_memory
from step01_single_gpu.mixed_precision import LossScaler, Optimizer
from step01_single_gpu.recompute import apply_recompute
from step01_single_gpu.running.run import Run
from step03_zero.apply_zero import apply_zero
from step04_tensor_parallel.apply_tensor_parallel import apply_tensor_parallel
from step04_tensor_parallel.partial_sums import sum_extra_groups
from step05_pipeline.apply_pipeline import place_stages, shared_ends
from step05_pipeline.config import schedule_of
from step05_pipeline.pipeline import Pipeline
from step05_pipeline.stages import mark_shared_parameters
from step06_context_parallel.context_parallel import apply_context_parallel, positions_of
from step07_expert_parallel.apply_experts import apply_experts, build_balancing
from step07_expert_parallel.apply_pipeline import build_pipeline
from step07_expert_parallel.balancing import RunningStatistics
from step08_5d.config import check
from step08_5d.fused import apply_kernels
from step08_5d.fused_adamw import make_optimizer
from step08_5d.multi_token import apply_multi_token, build_stages, mtp_loss, take_part
from step08_5d.narrow_numbers.layers import apply_fp8
from step08_5d.shapes import show_shapes


def build(config: TrainConfig, mesh: Mesh) -> tuple[Pipeline, Optimizer, list[RunningStatistics]]:
    """Build this rank's stages of the model, what runs them in the order of the schedule, and their optimizer."""
    schedule = schedule_of(config)
    stages = build_stages(config, schedule, mesh)  # one or several models with some of the layers
    scaler = LossScaler(config.torch_dtype)
    for stage in stages:
        apply_tensor_parallel(stage, config, mesh)
        apply_experts(stage, config, mesh, scaler)
        apply_context_parallel(stage, config, mesh)
        apply_recompute(stage, config.recompute)
        apply_kernels(stage, config, mesh)
        apply_multi_token(stage, config)
    mark_shared_parameters(stages, schedule, mesh.pp_forward.rank, shared_ends(config))
    zero_wrappers = [apply_zero(stage, config, mesh) for stage in stages]
    shards = [shard for zero in zero_wrappers for shard in zero.shards]
    statistics = [build_balancing(stages, config, mesh), *apply_fp8(stages, zero_wrappers, config, mesh)]
    kept = {"buffers": [buffer for each in statistics for buffer in each.buffers], "scaler": scaler}
    optimizer = make_optimizer(shards, config, mesh, **kept)
    return build_pipeline(schedule, stages, zero_wrappers, config, mesh), optimizer, statistics + mtp_loss(stages, mesh)


def train_step(
    step: int,
    pipeline: Pipeline,
    optimizer: Optimizer,
    statistics: list[RunningStatistics],
    batches: Batches,
    config: TrainConfig,
    mesh: Mesh,
    tracer: Tracer,
) -> dict[str, torch.Tensor]:
    """One update of the weights. Returns the step's numbers, 0-d float64 on the device: nothing waits for it here."""
    scaler = optimizer.scaler
    loss = torch.zeros((), dtype=torch.float64, device=mesh.device)  # stays 0 on ranks without the last stage
    positions = positions_of(config, mesh)

    # ---- gradients of the global batch: the schedule says when a micro-batch passes through a stage, and this how ----
    def forward(stage: Decoder, index: int, x: torch.Tensor | None) -> torch.Tensor:
        mask = ()
        if stage.has_embedding or stage.has_head or config.mask_documents:  # other stages read no data
            whole = batches.micro_batch(step, index, config.micro_batch, mesh.dp)
            tokens, targets, *mask = take_part(*whole, config, mesh, batches.corpus.end)
        y = stage(tokens if x is None else x, positions, *mask)
        if not stage.has_head:
            return y  # to the next stage
        share = stage.loss(y, targets) / batches.target_tokens  # of the mean over the whole global batch
        loss.add_(share.detach())
        return share * scaler.scale  # where the backward begins

    pipeline.run(forward, tracer)

    # ---- clip by the global norm, update ----
    with tracer.phase("optimizer"):
        gradients = pipeline.finish()
        sum_extra_groups(optimizer.parameters, gradients, mesh)  # norms, shared K/V heads, what stages share
        # gradients still carry the loss scale: divide it out of the norm, and of the factor that multiplies them
        norm = gradient_norm(optimizer.parameters, gradients, mesh) / scaler.scale
        factor = clip_factor(norm, config.clip) / scaler.scale
        optimizer.step(gradients, config.learning_rate(step), factor, skip=scaler.overflow(norm))
        noted = {}
        for each in statistics:  # ranks compare what they have counted, and start anew
            noted |= each.finish(skip=scaler.overflow(norm))
        collectives.all_reduce(loss, mesh.dp_cp)  # the sum of all shares is the mean
        collectives.all_reduce(loss, mesh.pp_forward)  # only ranks with a last stage have any
    return {"loss": loss, "grad_norm": norm} | noted


def train(config: TrainConfig, mesh: Mesh) -> list[torch.Tensor]:
    """Take the configured number of steps. Returns the tensors that this rank updates."""
    check_memory(config, mesh)
    batches = load_batches(config, mesh)
    mesh = place_stages(mesh, schedule_of(config).placement, config.timeout)
    pipeline, optimizer, statistics = build(config, mesh)
    show_shapes(pipeline.stages, config, mesh)  # with --shapes
    with Run(config, mesh, batches, optimizer) as run:
        for step in run.steps():
            run.log(train_step(step, pipeline, optimizer, statistics, batches, config, mesh, run.tracer))
    return [*optimizer.parameters, *optimizer.buffers]


if __name__ == "__main__":
    run(8, train, check)
