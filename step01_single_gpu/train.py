"""Step 1: train a Llama-style model in one process.

    python step01_single_gpu/train.py
    python step01_single_gpu/train.py --steps 20 --dtype bfloat16 --recompute selective --micro-batch 1
    python step01_single_gpu/train.py --model smollm-135m --seq-len 2048 --global-batch 64 --dtype bfloat16

The lesson is in step01_single_gpu/README.md. Every later step is this file plus one dimension.
"""

from common import collectives  # before torch, so that its idle threads sleep

# isort: split
import torch

from common.config import TrainConfig
from common.data.batches import load_batches
from common.launch import run
from common.model import ATTENTION_CORES, Decoder, cross_entropy_sum
from common.process_groups import Mesh
from common.record.run_record import RunRecord
from common.reductions import gradient_norm
from common.tracing.tracer import Tracer
from common.weights.initialisation import initial_values, materialise
from step01_single_gpu.memory_model.capacity import check_memory
from step01_single_gpu.mixed_precision import GradientSums, LossScaler, Optimizer, clip_factor
from step01_single_gpu.recompute import apply_recompute
from step01_single_gpu.save_resume import Checkpoints


def build(config: TrainConfig, mesh: Mesh) -> tuple[Decoder, GradientSums, Optimizer]:
    """Return the model with its initial weights, the sums of its gradients, and the optimizer."""
    model = Decoder(config.model_config, ATTENTION_CORES[config.attention])
    materialise(model, config.torch_dtype, mesh.device, initial_values(config))
    apply_recompute(model, config.recompute)
    parameters = list(model.parameters())
    return model, GradientSums(parameters), Optimizer(parameters, config)


def train(config: TrainConfig, mesh: Mesh) -> list[torch.Tensor]:
    """Take the configured number of steps. Returns the tensors that this rank updates."""
    collectives.link = config.link_model
    check_memory(config, mesh)
    batches = load_batches(config, mesh)
    model, gradient_sums, optimizer = build(config, mesh)
    scaler = LossScaler(config.torch_dtype)

    checkpoints = Checkpoints(config, mesh, batches, optimizer, scaler)
    first_step = checkpoints.resume()
    record = RunRecord(config, mesh, batches, first_step)
    tracer = Tracer(config.trace_range, mesh, config.run_dir, config.profile, config.memory_snapshot)

    for step in range(first_step, config.steps):
        with record.step(step) as measured, tracer.step(step):
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
                # the norm of the true gradients: the loss scale is divided out again
                norm = gradient_norm(optimizer.parameters, gradients, mesh.world) / scaler.scale
                factor = clip_factor(norm, config.clip) / scaler.scale
                lr = config.learning_rate(step)
                optimizer.step(gradients, lr, factor, skip=scaler.overflow(norm))
            loss, norm = torch.stack([loss, norm]).tolist()  # only here the host waits for the device
            if scaler.accept(norm):  # float16 may have skipped this step; it adjusts the scale
                optimizer.updates += 1
            measured.update(loss=loss, grad_norm=norm, lr=lr)

        checkpoints.save(step + 1)
    checkpoints.close()
    tracer.close()
    record.close()
    return optimizer.parameters


if __name__ == "__main__":
    run(1, train)
