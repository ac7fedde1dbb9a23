"""Step 4: the same run, with every layer divided among ranks: tensor and sequence parallelism.

    torchrun --nproc_per_node 2 step04_tensor_parallel/train.py --tp 2
    torchrun --nproc_per_node 4 step04_tensor_parallel/train.py --tp 2 --zero 3 --recompute full
    torchrun --nproc_per_node 4 step04_tensor_parallel/train.py --tp 4 --no-sequence-parallel --tp-mode plain

The lesson is in step04_tensor_parallel/README.md. `diff` this file with step03_zero/train.py to see what it adds.
"""

import common.entry  # noqa: F401 (before torch: one thread per process by default)

# isort: split
import torch

from common import collectives
from common.config import TrainConfig
from common.launching.launch import run
from common.model import ATTENTION_CORES, Decoder
from common.process_groups import Mesh
from common.tracing.tracer import Tracer
from step01_single_gpu.clipping import clip_factor, gradient_norm
from step01_single_gpu.data.batches import Batches, load_batches
from step01_single_gpu.memory_model.capacity import check_memory
from step01_single_gpu.mixed_precision import Optimizer
from step01_single_gpu.recompute import apply_recompute
from step01_single_gpu.running.run import Run
from step03_zero.apply_zero import apply_zero
from step03_zero.zero import Zero
from step04_tensor_parallel.apply_tensor_parallel import apply_tensor_parallel
from step04_tensor_parallel.config import check
from step04_tensor_parallel.partial_sums import sum_extra_groups


def build(config: TrainConfig, mesh: Mesh) -> tuple[Decoder, Zero, Optimizer]:
    """This rank's part of the model, what shards it over the data-parallel ranks, and the optimizer of its shards."""
    model = Decoder(config.model_config, ATTENTION_CORES[config.attention])
    apply_tensor_parallel(model, config, mesh)
    apply_recompute(model, config.recompute)
    zero = apply_zero(model, config, mesh)
    return model, zero, Optimizer(zero.shards, config.torch_dtype, config.weight_decay, config.optimizer)


def train_step(
    step: int,
    model: Decoder,
    zero: Zero,
    optimizer: Optimizer,
    batches: Batches,
    config: TrainConfig,
    mesh: Mesh,
    tracer: Tracer,
) -> dict[str, torch.Tensor]:
    """One update of the weights. Returns the step's numbers, 0-d float64 on the device: nothing waits for it here."""
    scaler = optimizer.scaler
    loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
    with tracer.phase("forward"):
        zero.gather()  # the shards as the last step left them, or the initial ones

    # ---- gradients of the global batch, a micro-batch at a time ----
    for index in range(config.accumulation_steps):
        tokens, targets = batches.micro_batch(step, index, config.micro_batch, mesh.dp, mesh.device)
        with tracer.phase("forward"):  # the loss is a share of the mean over the whole global batch
            share = model.loss(model(tokens), targets) / batches.target_tokens
        with tracer.phase("backward"), zero.backward(last=index == config.accumulation_steps - 1):
            (share * scaler.scale).backward()
        loss += share.detach()

    # ---- clip by the global norm, update ----
    with tracer.phase("optimizer"):
        gradients = zero.finish()
        sum_extra_groups(optimizer.parameters, gradients, mesh)  # norms, shared K/V heads: partial sums
        # gradients still carry the loss scale: divide it out of the norm, and of the factor that multiplies them
        norm = gradient_norm(optimizer.parameters, gradients, mesh) / scaler.scale
        factor = clip_factor(norm, config.clip) / scaler.scale
        optimizer.step(gradients, config.learning_rate(step), factor, skip=scaler.overflow(norm))
        collectives.all_reduce(loss, mesh.dp_cp)  # the sum of all shares is the mean
    return {"loss": loss, "grad_norm": norm}


def train(config: TrainConfig, mesh: Mesh) -> list[torch.Tensor]:
    """Take the configured number of steps. Returns the tensors that this rank updates."""
    check_memory(config, mesh)
    batches = load_batches(config, mesh)
    model, zero, optimizer = build(config, mesh)
    with Run(config, mesh, batches, optimizer) as run:
        for step in run.steps():
            run.log(train_step(step, model, zero, optimizer, batches, config, mesh, run.tracer))
    return optimizer.parameters


if __name__ == "__main__":
    run(4, train, check)
