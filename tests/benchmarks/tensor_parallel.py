"""Step 4 against DTensor: same model, same batch, same optimizer, taking turns in one run.

    python -m tests.benchmarks.tensor_parallel                     # 2 and 4 gloo ranks, 30 pairs each
    python -m tests.benchmarks.tensor_parallel --ranks 2 --modes plain overlap --pairs 10

The peer is `parallelize_module` with its column- and row-wise styles, sequence parallel and loss parallel, laid out as
PyTorch's tutorial does. Last comes step 4's default mode against its plain one, where a small model has little to hide.
"""

from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, parallel

from tests.benchmarks import paired
from tests.benchmarks.kept import keep
from tests.benchmarks.paired import adamw, compare, first_batch, our_step, parse_options

# 36 M parameters; long enough sequences that activations, which is what travels here, matter
MODEL = "--vocab 8192 --hidden 512 --layers 8 --heads 8 --kv-heads 8 --ffn 1536 --no-tie-embeddings"
SMALL = "--vocab 512 --hidden 128 --layers 4 --heads 8 --kv-heads 8 --ffn 384 --no-tie-embeddings"
BATCH = "--seq-len 256 --micro-batch 2 --global-batch 2"


def dtensor_step(flags: str):
    """The same with DTensor."""
    config, mesh, tokens, targets = first_batch(flags)
    model, ranks = paired.whole_model(config), init_device_mesh(mesh.device.type, (mesh.tp.size,))
    ends = {
        "embedding": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": parallel.SequenceParallel(),
        "head": parallel.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallel.parallelize_module(model, ranks, ends)

    def gathered(*others):
        """The input of a block, which is cut along the sequence, in one piece; other inputs as they are."""
        layouts = {"input_layouts": (Shard(1), *others), "desired_input_layouts": (Replicate(), *others)}
        return parallel.PrepareModuleInput(**layouts, use_local_output=True)

    plan = {"attention": gathered(None), "mlp": gathered()}
    plan |= {name: parallel.SequenceParallel() for name in ("attention_norm", "mlp_norm")}
    plan |= {f"attention.{name}_proj": parallel.ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": parallel.ColwiseParallel() for name in ("gate", "up")}
    plan |= {name: parallel.RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.o_proj", "mlp.down_proj")}
    for layer in model.layers.values():
        parallel.parallelize_module(layer, ranks, plan)
    optimizer = adamw(model, config)

    def step():
        with parallel.loss_parallel():
            loss = paired.mean_loss(model(tokens), targets)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor().item()

    return step


def main() -> None:
    options, rows = parse_options(__doc__, modes=["plain", "overlap", "chunked"]), {}
    print("step 4 / DTensor: throughput, median of pairs [95% interval]; peak memory of the fullest rank")
    for world in options.ranks:
        flags = f"{MODEL} {BATCH} --tp {world}"
        for mode in options.modes:
            sides = partial(our_step, 4, f"{flags} --tp-mode {mode}"), partial(dtensor_step, flags)
            rows[f"{mode}_{world}_ranks"] = compare(f"--tp-mode {mode}", world, *sides, options.pairs)
    modes = [partial(our_step, 4, f"{SMALL} {BATCH} --tp 2 --tp-mode {mode}") for mode in ("overlap", "plain")]
    rows["overlap_against_plain"] = compare("overlap / plain, of a model of 1 M", 2, *modes, options.pairs)
    keep("tensor_parallel", rows, options.pairs, options.whole)


if __name__ == "__main__":
    paired.run_as_module("tensor_parallel")
