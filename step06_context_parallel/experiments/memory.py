"""What a rank keeps: buffers for keys and values, and activations of a layer."""

import gc

import torch

from common.config import TrainConfig
from common.drawing.tables import print_comparison
from common.experiments.local_ranks import on_ranks
from common.experiments.training_step import Training, checked, on_every_case
from common.measure.saved_tensors import SavedTensors
from common.process_groups import Mesh
from step01_single_gpu.running.memory_meter import MemoryMeter
from step06_context_parallel import cost, train
from step06_context_parallel.all_gather_attention import all_gather_attention
from step06_context_parallel.experiments.tools import MODES, SHAPE, WIDTHS, AttentionLayer
from step06_context_parallel.ring_attention import ring_attention

FUNCTIONS = {"ring": ring_attention, "allgather": all_gather_attention}


def buffers(quick: bool) -> None:
    """Keys and values in memory at once: the ring holds two ranks' at any cp, an all-gather those of all ranks."""
    part, rows, alone = 256, [], {}  # tokens of a rank
    shape, keys = SHAPE | {"micro_batch": 1, "global_batch": 1}, [(d, mode) for d in WIDTHS for mode in FUNCTIONS]
    model = TrainConfig(**shape).model_config
    size, queries = part * model.kv_heads * model.head_width, part * model.heads * model.head_width  # elements
    for ranks in (1, 2) if quick else (1, 2, 4, 8):
        flags = [shape | {"seq_len": part * ranks, "cp": ranks, "dtype": d, "cp_mode": mode} for d, mode in keys]
        found = on_ranks(ranks, on_every_case, peaks, flags, title="buffers", jobs=len(flags))
        for index, (dtype, mode) in enumerate(keys):
            for phase, predicted in cost.buffers(mode, ranks, size, WIDTHS[dtype], 4).items():
                peak = max(each[index][phase] for each in found)
                before = alone.setdefault((dtype, phase), peak)  # one rank's ring, which sends nothing
                if ranks > 1:
                    if (mode, phase) == ("allgather", "backward"):
                        scattering = cost.while_scattering(ranks, size, queries, WIDTHS[dtype], 4)
                        predicted = max(predicted, scattering - before)
                    rows.append((f"cp {ranks}, {dtype}, {mode}: {phase}", predicted, peak - before))
    title = f"peak of one attention layer beyond that of one rank alone, {part} tokens per rank, bytes"
    print_comparison(f"{title}; keys of a rank: {size} elements", "", rows)


def peaks(mesh: Mesh, flags: dict) -> dict[str, int]:
    """On a rank: bytes that the forward, and the backward, of one layer allocate at most. No mask: equal blocks."""
    layer = AttentionLayer(mesh, **flags)
    function, inputs, result = FUNCTIONS[flags["cp_mode"]], (layer.q, layer.k, layer.v), {}
    for _ in range(2):  # the first one starts what the process needs once
        gc.collect()
        with MemoryMeter("cpu").measure() as measured:
            out = function(*inputs, layer.mesh.cp, "contiguous", causal=False)
        result["forward"] = measured.peak_bytes
        with MemoryMeter("cpu").measure() as measured:
            torch.autograd.grad(out, inputs, layer.gradient)
        result["backward"] = measured.peak_bytes
        del out
    return result


def activations(quick: bool) -> None:
    """Bytes that one layer keeps for the backward: those of one process, divided by cp."""
    rows, config = [], TrainConfig(**SHAPE)
    batch, seq = config.micro_batch, config.seq_len
    for ranks in (1, 2) if quick else (1, 2, 4):
        keys = [(dtype, mode) for dtype in WIDTHS for mode in (MODES if ranks > 1 else ["ring"])]
        shapes = [SHAPE | {"cp": ranks, "dtype": dtype, "cp_mode": mode} for dtype, mode in keys]
        cases = [shape | {"layers": layers} for shape in shapes for layers in (1, 2)]
        found = on_ranks(ranks, on_every_case, kept_for_backward, cases, title="activations", jobs=len(cases))[0]
        for index, (dtype, mode) in enumerate(keys):
            one, two = found[2 * index : 2 * index + 2]
            whole = seq if mode == "ulysses" else 0
            predicted = cost.kept(config.model_config, batch, seq // ranks, getattr(torch, dtype), whole)
            rows.append((f"cp {ranks}, {dtype}" + f", {mode}" * (ranks > 1), predicted, two - one))
    print_comparison("bytes that one layer keeps on a rank", "", rows)


def kept_for_backward(mesh: Mesh, flags: dict) -> int:
    """Bytes that a forward leaves for the backward on this rank, each storage once, without the weights."""
    run = Training(train, *checked(mesh, **flags))
    (stage,) = run.parts[0].stages
    whole = run.batches.micro_batch(0, 0, run.config.micro_batch)
    tokens, _ = train.take_part(*whole, run.config, run.mesh, run.batches.corpus.end)
    with SavedTensors(stage) as saved:
        logits = stage(tokens, train.positions_of(run.config, run.mesh))
    del logits
    return saved.bytes
