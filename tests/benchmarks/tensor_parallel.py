"""Step 4 against DTensor: same model, same batch, same optimizer, taking turns in one run.

    python -m tests.benchmarks.tensor_parallel                     # 2 and 4 gloo ranks, 30 pairs each
    python -m tests.benchmarks.tensor_parallel --ranks 2 --modes plain overlap --pairs 10
    python -m tests.benchmarks.tensor_parallel --against plain     # the modes of step 4 against its plain one

The peer is `parallelize_module` with its column- and row-wise styles, sequence parallel and loss parallel, laid out as
PyTorch's tutorial does. Each timed call is a whole training step: forward, backward, clipping by the global norm,
AdamW. Memory is measured apart from that, with one side alone in its processes. `--small` takes a model of 1 M.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F

from common.config import TrainConfig
from common.model import Decoder
from common.model_config import ModelConfig
from common.process_groups import Degrees, build_mesh
from common.weights.initialisation import materialise, random_values
from step01_single_gpu.clipping import clip_factor, gradient_norm
from step04_tensor_parallel.partial_sums import sum_extra_groups
from step04_tensor_parallel.train import build
from step04_tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy_sum
from tests.benchmarks.paired import compare, keep, measure_steps

# 36 M parameters; long enough sequences that activations, which is what travels here, matter
MODEL = ModelConfig(vocab=8192, hidden=512, layers=8, heads=8, kv_heads=8, ffn=1536, tie_embeddings=False)
SMALL = ModelConfig(vocab=512, hidden=128, layers=4, heads=8, kv_heads=8, ffn=384, tie_embeddings=False)
SEQ, BATCH = 256, 2
MODES = ("plain", "overlap", "chunked")


def our_step(model_config: ModelConfig, mode: str, mesh, tokens, targets):
    """One training step of step 4 as a function without arguments."""
    config = TrainConfig(tp=mesh.tp.size, dp=1, tp_mode=mode)
    config.model_config = model_config
    model, zero, optimizer = build(config, mesh)

    def step():
        zero.gather()
        loss = vocab_parallel_cross_entropy_sum(model(tokens), targets, model_config.vocab, mesh.tp) / targets.numel()
        loss.backward()
        gradients = zero.finish()
        sum_extra_groups(optimizer.parameters, gradients, mesh)
        norm = gradient_norm(optimizer.parameters, gradients, mesh.world)
        optimizer.step(gradients, config.lr, clip_factor(norm, config.clip))
        return loss.item()

    return step


def peer_step(model_config: ModelConfig, mesh, tokens, targets):
    """The same with DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, parallel

    config, model = TrainConfig(), Decoder(model_config)
    materialise(model, torch.float32, mesh.device, random_values(0))
    ranks = init_device_mesh(mesh.device.type, (mesh.tp.size,))
    ends = {
        "embedding": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": parallel.SequenceParallel(),
        "head": parallel.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallel.parallelize_module(model, ranks, ends)

    def gathered(*others):
        """The input of a block, which is cut along the sequence, in one piece; other inputs as they are."""
        return parallel.PrepareModuleInput(
            input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others), use_local_output=True
        )

    plan = {"attention": gathered(None), "mlp": gathered()}
    plan |= {name: parallel.SequenceParallel() for name in ("attention_norm", "mlp_norm")}
    plan |= {f"attention.{name}_proj": parallel.ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": parallel.ColwiseParallel() for name in ("gate", "up")}
    plan |= {name: parallel.RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.o_proj", "mlp.down_proj")}
    for layer in model.layers.values():
        parallel.parallelize_module(layer, ranks, plan)
    decay = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), eps=1e-5, fused=True)

    def step():
        with parallel.loss_parallel():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor().item()

    return step


def on_rank(case: tuple[ModelConfig, str, str], pairs: int, sides: tuple[str, ...]):
    """With both sides: their times on this rank, and how far their losses are apart. With one: its peak bytes.

    A case is a model, our mode, and another one or "dtensor" for the peer.
    """
    model, ours, peer = case
    mesh = build_mesh(Degrees(tp=dist.get_world_size()), torch.device("cpu"))
    tokens = torch.randint(model.vocab, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    batch = mesh, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    make = {"ours": lambda: our_step(model, ours, *batch), "peer": lambda: our_step(model, peer, *batch)}
    if peer == "dtensor":
        make["peer"] = lambda: peer_step(model, *batch)
    steps = [make[side]() for side in sides]
    return measure_steps(steps, pairs, mesh.device)


def main() -> None:
    from tests.benchmarks.tensor_parallel import on_rank  # by the name under which ranks can import it

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--against", default="dtensor", choices=("dtensor", *MODES))
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    model, against, rows = SMALL if arguments.small else MODEL, arguments.against, {}
    print(f"step 4 / {against}: throughput, median of pairs [95% interval]; peak memory of the fullest rank")
    for world in arguments.ranks:
        for mode in arguments.modes:
            case = model, mode, against
            rows[f"{mode}_{world}_ranks"] = compare(f"--tp-mode {mode}", world, on_rank, case, arguments.pairs)
    name = "tensor_parallel" + (f"_against_{against}" if against != "dtensor" else "") + "_small" * arguments.small
    print(f"written: {keep(name, rows)}")


if __name__ == "__main__":
    main()
