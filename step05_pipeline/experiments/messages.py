"""How many messages, how many bytes, and whether the result is the same."""

from collections import Counter

from common.collectives import barrier, record
from common.config import TrainConfig
from common.drawing.tables import print_comparison, print_table
from common.experiments import tcp_bytes as wire
from common.experiments.gradients import compare_gradients, worst_difference
from common.experiments.local_ranks import on_ranks
from common.experiments.runs import overlay, reference_gradients
from common.experiments.training_step import on_every_case
from common.process_groups import Mesh
from step05_pipeline.experiments import predictions
from step05_pipeline.experiments.tools import ORDER, SHAPE, Run
from step05_pipeline.train import train

PIPELINES = ("pp_forward", "pp_backward")
PLACEMENTS = {"zbv": "v", "dualpipev": "v", "dualpipe": "bidirectional"}
CHUNKS = {"interleaved": 2, "breadth-first": 2, "llama3": 2}


def messages(quick: bool) -> None:
    """Messages and bytes of a step: by formula, by the log of calls, by what the TCP sockets sent; x v, / tp."""
    ranks, m = (2, 4) if quick else (4, 8)
    shape = SHAPE | {"global_batch": m, "layers": 4 * ranks, "seq_len": 128}
    cases = [(name, {"pp": ranks, "schedule": name}) for name in ORDER]
    cases.append(("interleaved, v 4", {"pp": ranks, "schedule": "interleaved", "virtual_stages": 4}))
    cases.append(("1f1b, bfloat16", {"pp": ranks, "schedule": "1f1b", "dtype": "bfloat16"}))
    if not quick:
        cases.append(("1f1b, dp 2, pp 2", {"pp": 2, "dp": 2, "schedule": "1f1b"}))
        cases.append(("1f1b, pp 2, tp 2 with SP", {"pp": 2, "tp": 2, "schedule": "1f1b"}))
        flags = {"pp": 2, "tp": 2, "schedule": "1f1b", "sequence_parallel": False}
        cases.append(("1f1b, pp 2, tp 2 without SP", flags))
    found = on_ranks(ranks, on_every_case, count_messages, [shape | each for _, each in cases], jobs=len(cases))
    rows, sizes = [], []
    for index, (name, flags) in enumerate(cases):
        each = [part[index] for part in found]
        number, size = expected(shape | flags)
        counted, log, sockets = (sum(part[key] for part in each) for key in ("messages", "bytes", "sockets"))
        rows.append((name, number, counted, each[min(1, ranks - 1)]["messages"]))
        cells = (f"{size:,}", f"{number * size:,}", f"{log / (number * size):.4f}")
        alone = flags["pp"] == ranks  # otherwise tp or dp send over the same sockets
        sizes.append((name, *cells, f"{sockets / (number * size):.4f}" if alone else ""))
    title = f"{ranks} ranks, {m} micro-batches: messages of a step, forward and backward, of all ranks"
    print_table(title, ("", "formula", "log of calls", "sent by rank 1"), rows)
    print_table("and their bytes", ("", "a message", "of a step", "log / formula", "TCP sockets / formula"), sizes)
    shared(ranks, shape)


def expected(flags: dict) -> tuple[int, int]:
    """Predicted number of messages of all ranks, and bytes of each."""
    config, name = TrainConfig(**flags), flags["schedule"]
    pipelines = flags.get("tp", 1) * flags.get("dp", 1)  # side by side, each with its part of the batch
    v, m = (
        flags.get("virtual_stages", CHUNKS.get(name, 1)),
        config.global_batch // (config.micro_batch * flags.get("dp", 1)),
    )
    number = predictions.messages(config.pp, m, v, PLACEMENTS.get(name, "looped"))
    cut = config.tp if config.sequence_parallel else 1
    width = config.torch_dtype.itemsize
    size = predictions.message_bytes(config.micro_batch, config.seq_len, config.model_config.hidden, width, cut)
    return number * pipelines, size


def count_messages(mesh: Mesh, flags: dict) -> dict[str, int]:
    """On a rank: messages that it sent between stages in one step, their bytes, and what its sockets sent."""
    run = Run(mesh, **flags)
    barrier(mesh.world)
    before = wire.sent_by_me() or 0
    barrier(mesh.world)  # everybody has read, before anybody sends
    with record() as calls:
        run.accumulate()
    sockets = (wire.sent_by_me() or 0) - before
    barrier(mesh.world)
    sent = [call for call in calls if call.op == "send"]
    assert all(call.group in PIPELINES for call in sent)
    run.finish()
    return {"messages": len(sent), "bytes": sum(call.bytes for call in sent), "sockets": sockets}


def shared(ranks: int, shape: dict) -> None:
    """What stages that hold the same parameters send besides: once a step."""
    cases = {
        "1f1b, tied": ("embed", {"schedule": "1f1b", "tie_embeddings": True}),
        "zbv, tied": ("embed", {"schedule": "zbv", "tie_embeddings": True}),
        "dualpipe": ("mirror", {"schedule": "dualpipe"}),
    }
    flags = [shape | {"pp": ranks} | more for _, more in cases.values()]
    found = on_ranks(ranks, on_every_case, count_shared, flags, jobs=len(cases))[0]
    rows, model = [], TrainConfig(**shape).model_config
    for (name, (group, _)), counted in zip(cases.items(), found):
        if name == "dualpipe":  # rank 0 has the first stage of one copy and the last of the other
            per_stage = model.layers // ranks
            size = predictions.stage_parameters(model, 0, per_stage)
            size += predictions.stage_parameters(model, model.layers - per_stage, model.layers)
        else:  # V-shaped: first and last stage share a rank, and nothing has to be sent
            size = model.vocab * model.hidden if name.startswith("1f1b") else 0
        rows.append((f"{name}: group {group}", 4.0 * size, counted[group]))
    print_comparison(
        f"{ranks} ranks: bytes that rank 0 sends once a step for parameters that other stages hold too", "", rows
    )


def count_shared(mesh: Mesh, flags: dict) -> dict[str, int]:
    """On a rank: model bytes of a step by group."""
    run, sent = Run(mesh, **flags), Counter()
    with record() as calls:
        run.gradients()
    for call in calls:
        sent[call.group] += call.bytes
    return {name: sent[name] for name in ("embed", "mirror")}


# ---- the same result -------------------------------------------------------------------------------------------------

FLOAT64 = SHAPE | {"hidden": 32, "ffn": 48, "seq_len": 16, "global_batch": 8, "dtype": "float64"}


def gradients(quick: bool) -> None:
    """Gradients of every schedule against one process that takes the whole global batch at once, in float64."""
    cases = [(2, name, {"pp": 2, "schedule": name}) for name in ORDER]
    if not quick:
        cases += [(4, name, {"pp": 4, "schedule": name}) for name in ORDER]
        cases += [(4, f"{name}, tied", {"pp": 4, "schedule": name, "tie_embeddings": True}) for name in ORDER]
        odd = {"pp": 4, "layers": 9, "global_batch": 3}
        cases += [(4, f"{name}, 9 layers, m 3", odd | {"schedule": name}) for name in ORDER if name != "interleaved"]
        more = {"recompute": "full", "pp": 4}
        cases += [(4, f"{name}, full recomputation", more | {"schedule": name}) for name in ("1f1b", "zb-h1")]
        both = {"pp": 2, "tp": 2}
        cases += [(4, f"{name}, pp 2, tp 2", both | {"schedule": name}) for name in ("1f1b", "zbv", "dualpipe")]
        for stage in (0, 1, 2, 3):
            flags = {"pp": 2, "schedule": "1f1b", "zero": stage}
            cases.append((4, f"1f1b, dp 2, pp 2, ZeRO {stage}", flags))
    compare_gradients(
        on_every_case, gradient_difference, [(size, name, FLOAT64 | flags) for size, name, flags in cases]
    )


def gradient_difference(mesh: Mesh, flags: dict) -> float:
    """The largest relative difference between a gradient of this rank and its part of one process's gradient."""
    run = Run(mesh, **flags)
    return worst_difference(run.shards, run.gradients(), reference_gradients(run.config, run.batches))


def curves(quick: bool) -> None:
    """The default run in a pipeline beside step 1's: the same loss and gradient norm, up to rounding."""
    shorter = {"seq_len": 32} if quick else {}
    variants = {"one": (1, shorter), "1f1b pp 2": (2, shorter | {"pp": 2})}
    if not quick:
        variants["zbv pp 2"] = (2, {"pp": 2, "schedule": "zbv"})
        variants["1f1b pp 4"] = (4, {"pp": 4})
        variants["dualpipe pp 4"] = (4, {"pp": 4, "schedule": "dualpipe"})
        variants["interleaved dp 2 pp 2"] = (4, {"pp": 2, "schedule": "interleaved", "micro_batch": 1})
    overlay(train, variants, quick)
