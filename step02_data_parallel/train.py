"""Step 2: the same run, with the samples of a step divided among ranks.

    torchrun --nproc_per_node 2 step02_data_parallel/train.py
    torchrun --nproc_per_node 4 step02_data_parallel/train.py --dp-mode overlap --micro-batch 1
    torchrun --nproc_per_node 2 step02_data_parallel/train.py --link 50,0.05 --run-dir runs/link --trace 3:5

The lesson is in step02_data_parallel/README.md. `diff` this file with step01_single_gpu/train.py to see what it adds.
"""

import common.entry  # noqa: F401 (before torch: one thread per process by default)

# isort: split
import torch

from common import collectives
from common.config import TrainConfig
from common.launching.launch import run
from common.model import ATTENTION_CORES, Decoder, cross_entropy_sum
from common.process_groups import Mesh
from common.tracing.tracer import Tracer
from common.weights.initialisation import materialise
from step01_single_gpu.clipping import clip_factor, gradient_norm
from step01_single_gpu.data.batches import Batches, load_batches
from step01_single_gpu.initial_weights import initial_values
from step01_single_gpu.memory_model.capacity import check_memory
from step01_single_gpu.mixed_precision import Optimizer
from step01_single_gpu.recompute import apply_recompute
from step01_single_gpu.running.run import Run
from step02_data_parallel.config import check
from step02_data_parallel.data_parallel import DataParallel


def build(config: TrainConfig, mesh: Mesh) -> tuple[Decoder, DataParallel, Optimizer]:
    """Return the model with its initial weights, the sums of its gradients over all ranks, and the optimizer."""
    model = Decoder(config.model_config, ATTENTION_CORES[config.attention])
    materialise(model, config.torch_dtype, mesh.device, initial_values(config))
    apply_recompute(model, config.recompute)
    parameters = list(model.parameters())
    data_parallel = DataParallel(parameters, mesh.dp_cp, config.dp_mode, config.bucket_mb)
    return model, data_parallel, Optimizer(parameters, config.torch_dtype, config.weight_decay, config.optimizer)


def train_step(
    step: int,
    model: Decoder,
    data_parallel: DataParallel,
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
        tokens, targets = batches.micro_batch(step, index, config.micro_batch, mesh.dp, mesh.device)
        with tracer.phase("forward"):  # the loss is a share of the mean over the whole global batch
            share = cross_entropy_sum(model(tokens), targets) / batches.target_tokens
        with tracer.phase("backward"), data_parallel.backward(last=index == config.accumulation_steps - 1):
            (share * scaler.scale).backward()
        loss += share.detach()

    # ---- clip by the global norm, update ----
    with tracer.phase("optimizer"):
        gradients = data_parallel.finish()
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
    model, data_parallel, optimizer = build(config, mesh)
    with Run(config, mesh, batches, optimizer) as run:
        for step in run.steps():
            run.log(train_step(step, model, data_parallel, optimizer, batches, config, mesh, run.tracer))
    return optimizer.parameters


if __name__ == "__main__":
    run(2, train, check)
