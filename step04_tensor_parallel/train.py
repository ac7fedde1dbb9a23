"""Step 4: the same run, with every layer divided among ranks: tensor and sequence parallelism.

    torchrun --nproc_per_node 2 step04_tensor_parallel/train.py --tp 2
    torchrun --nproc_per_node 4 step04_tensor_parallel/train.py --tp 2 --zero 3 --recompute full
    torchrun --nproc_per_node 4 step04_tensor_parallel/train.py --tp 4 --no-sequence-parallel --tp-mode plain

The lesson is in step04_tensor_parallel/README.md. `diff` this file with step03_zero/train.py to see what it adds.
"""

import torch

from common import collectives
from common.config import TrainConfig
from common.data import load_batches
from common.launch import run
from common.model import ATTENTION_CORES, Decoder
from common.parameter import gradient_norm, sum_extra_groups
from common.process_groups import Mesh
from common.run_record import TrainingRecord
from common.tracer import Tracer
from step01_single_gpu.checkpointing import Checkpoints
from step01_single_gpu.mixed_precision import LossScaler, Optimizer, clip_factor
from step01_single_gpu.recompute import apply_recompute
from step03_zero.zero import Zero
from step04_tensor_parallel.tensor_parallel import apply_tensor_parallel
from step04_tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy_sum


def train(config: TrainConfig, mesh: Mesh) -> list[torch.Tensor]:
    collectives.link = config.link_model
    batches = load_batches(config)

    # ---- model, gradients, optimizer ----
    model = Decoder(config.model_config, ATTENTION_CORES[config.attention])
    apply_tensor_parallel(model, config, mesh)
    apply_recompute(model, config.recompute)
    zero = Zero(model, config, mesh)
    parameters = zero.shards  # from here on, a rank knows only its own: pieces of the model's parameters
    optimizer, scaler = Optimizer(parameters, config), LossScaler(config.torch_dtype)

    checkpoints = Checkpoints(config, mesh, batches, optimizer, scaler)
    first_step = checkpoints.resume()
    record = TrainingRecord(config, mesh, batches, first_step)
    tracer = Tracer(config.trace_range, mesh, config.run_dir, config.profile, config.memory_snapshot)

    accumulation = config.accumulation_steps(config.dp)
    for step in range(first_step, config.steps):
        with record.step(step) as measured, tracer.step(step):
            loss = torch.zeros((), dtype=torch.float64, device=mesh.device)

            with tracer.phase("forward"):
                zero.gather()  # the shards as the last step left them, or the initial ones

            # ---- gradients of the global batch, a micro-batch at a time ----
            for index in range(accumulation):
                tokens, targets = batches.micro_batch(
                    step, index, config.micro_batch, mesh.dp.rank, mesh.dp.size, mesh.device
                )
                with tracer.phase("forward"):  # the loss is a share of the mean over the whole global batch
                    total = vocab_parallel_cross_entropy_sum(model(tokens), targets, config.model_config.vocab, mesh.tp)
                    share = total / batches.target_tokens
                with tracer.phase("backward"), zero.no_sync(index < accumulation - 1):
                    (share * scaler.scale).backward()
                loss += share.detach()

            # ---- clip by the global norm, update ----
            with tracer.phase("optimizer"):
                summed = zero.finish()
                sum_extra_groups(parameters, summed, mesh)  # norms and shared K/V heads: partial sums on tp ranks
                # each element is counted by its owner only; unscaled before the clip
                norm = gradient_norm(parameters, summed, mesh.world).item() / scaler.scale
                factor, lr = clip_factor(norm, config.clip) / scaler.scale, config.learning_rate(step)
                if scaler.accept(norm):  # float16 skips a step that overflowed
                    optimizer.step(summed, lr, factor)  # empties the list
                collectives.all_reduce(loss, mesh.dp_cp)  # the sum of all shares is the mean
            measured.update(loss=loss.item(), grad_norm=norm, lr=lr)

        checkpoints.save(step + 1)
    checkpoints.close()
    tracer.close()
    record.close()
    return parameters


if __name__ == "__main__":
    run(4, train)
