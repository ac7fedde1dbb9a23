"""Step 1: train a Llama-style model in one process.

    python step01_single_gpu/train.py
    python step01_single_gpu/train.py --steps 20 --dtype bfloat16 --recompute selective --micro-batch 1
    python step01_single_gpu/train.py --model smollm-135m --seq-len 2048 --global-batch 64 --dtype bfloat16

The lesson is in step01_single_gpu/README.md. The folders beside this one each add a way to divide the run among
processes, and the last one trains with all of them.
"""

import common.entry  # noqa: F401 (before torch: one thread per process by default)

# isort: split
import torch

from common.config import TrainConfig
from common.launching.launch import run
from common.model import ATTENTION_CORES, Decoder, cross_entropy_sum
from common.process_groups import Mesh
from common.tracing.tracer import Tracer
from common.weights.initialisation import materialise
from step01_single_gpu.clipping import clip_factor, gradient_norm
from step01_single_gpu.config import check
from step01_single_gpu.data.batches import Batches, load_batches
from step01_single_gpu.initial_weights import initial_values
from step01_single_gpu.memory_model.capacity import check_memory
from step01_single_gpu.mixed_precision import GradientSums, Optimizer
from step01_single_gpu.recompute import apply_recompute
from step01_single_gpu.running.run import Run


def build(config: TrainConfig, mesh: Mesh) -> tuple[Decoder, GradientSums, Optimizer]:
    """Return the model with its initial weights, the sums of its gradients, and the optimizer."""
    model = Decoder(config.model_config, ATTENTION_CORES[config.attention])
    materialise(model, config.torch_dtype, mesh.device, initial_values(config))
    apply_recompute(model, config.recompute)
    parameters = list(model.parameters())
    optimizer = Optimizer(parameters, config.torch_dtype, config.weight_decay, config.optimizer)
    return model, GradientSums(parameters), optimizer


def train_step(
    step: int,
    model: Decoder,
    gradient_sums: GradientSums,
    optimizer: Optimizer,
    batches: Batches,
    config: TrainConfig,
    mesh: Mesh,
    tracer: Tracer,
) -> dict[str, torch.Tensor]:
    """One update of the weights. Returns the step's numbers, 0-d float64 on the device: nothing waits for it here."""
    scaler = optimizer.scaler
    loss = torch.zeros((), dtype=torch.float64, device=mesh.device)

    # ---- gradients of the global batch, a micro-batch at a time ----
    for index in range(config.accumulation_steps):
        tokens, targets = batches.micro_batch(step, index, config.micro_batch, device=mesh.device)
        with tracer.phase("forward"):  # the loss is a share of the mean over the whole global batch
            share = cross_entropy_sum(model(tokens), targets) / batches.target_tokens
        with tracer.phase("backward"):
            (share * scaler.scale).backward()
        loss += share.detach()

    # ---- clip by the global norm, update ----
    with tracer.phase("optimizer"):
        gradients = gradient_sums.finish()
        # gradients still carry the loss scale: divide it out of the norm, and of the factor that multiplies them
        norm = gradient_norm(optimizer.parameters, gradients, mesh) / scaler.scale
        factor = clip_factor(norm, config.clip) / scaler.scale
        optimizer.step(gradients, config.learning_rate(step), factor, skip=scaler.overflow(norm))
    return {"loss": loss, "grad_norm": norm}


def train(config: TrainConfig, mesh: Mesh) -> list[torch.Tensor]:
    """Take the configured number of steps. Returns the tensors that this rank updates."""
    check_memory(config, mesh)
    batches = load_batches(config, mesh)
    model, gradient_sums, optimizer = build(config, mesh)
    with Run(config, mesh, batches, optimizer) as run:
        for step in run.steps():
            run.log(train_step(step, model, gradient_sums, optimizer, batches, config, mesh, run.tracer))
    return optimizer.parameters


if __name__ == "__main__":
    run(1, train, check)
