"""What travels because experts do not: bytes of dispatch and combine, and whether every token arrives."""

import torch

from common.collectives import barrier, record
from common.drawing.tables import print_table
from common.experiments import tcp_bytes
from common.experiments.local_ranks import on_ranks
from common.experiments.training_step import on_every_case
from common.presets import PRESETS
from common.process_groups import Mesh
from step07_expert_parallel.experiments import predictions
from step07_expert_parallel.experiments.ranks import BYTES, SHAPE, ExpertLayer, routing

PHASES = ("forward", "backward")
LAYOUTS = ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2))  # (ep, tp) on ep ranks
TOKENS = SHAPE["micro_batch"] * SHAPE["seq_len"]  # of a rank without tp


def traffic(quick: bool) -> None:
    """Bytes that a rank sends for one layer of experts: by formula, by the log of calls, by what the sockets sent."""
    balanced, exact = [], []
    for ranks, tp in LAYOUTS[:1] if quick else LAYOUTS:
        keys = [(dtype, evenly) for dtype in BYTES for evenly in (True, False)]
        cases = [SHAPE | {"ep": ranks, "tp": tp, "dtype": dtype, "evenly": evenly} for dtype, evenly in keys]
        found = on_ranks(ranks, on_every_case, send, cases, title="traffic", jobs=len(cases))
        for index, (dtype, evenly) in enumerate(keys):
            of_ranks, name = [part[index] for part in found], f"ep {ranks}" + f", tp {tp}" * (tp > 1) + f", {dtype}"
            if evenly:
                balanced += [balanced_row(name, of_ranks, BYTES[dtype], phase) for phase in PHASES]
            else:
                exact.append(exact_row(name, of_ranks, BYTES[dtype]))
    header = ("", "formula", "log of calls", "ratio", "of counts", "TCP sockets", "TCP / log")
    shape = f"{TOKENS} tokens on a rank (with tp its part of them), h {SHAPE['hidden']}, k {SHAPE['top_k']}"
    print_table(f"chosen in turn: bytes that a rank sends, mean over ranks; {shape}", header, balanced)
    header = ("", "formula", "least of a rank", "most", "all ranks / formula", "log = rows of the router", "TCP / log")
    print_table("chosen by the router: the same, forward and backward", header, exact)
    large_models()


def send(mesh: Mesh, flags: dict) -> dict:
    """On a rank: in each phase the bytes of tokens and of counts, and those of the sockets; what the router chose."""
    flags = dict(flags)
    evenly = flags.pop("evenly")
    layer = ExpertLayer(mesh, **flags)
    result = {"tokens": layer.tokens, "log": {}, "counts": {}, "sockets": {}}
    with routing(evenly):
        for phase in PHASES:
            barrier(mesh.world)
            before = tcp_bytes.sent_by_me() or 0
            barrier(mesh.world)  # every rank has read its counter before any rank sends
            with record() as calls:
                getattr(layer, phase)()
            barrier(mesh.world)  # what was issued has left
            result["sockets"][phase] = (tcp_bytes.sent_by_me() or 0) - before
            result["log"][phase] = sum(call.bytes for call in calls if call.dtype != "int64")
            result["counts"][phase] = sum(call.bytes for call in calls if call.dtype == "int64")
    return result | {"chosen": layer.chosen}


def balanced_row(name: str, ranks: list[dict], beta: int, phase: str) -> tuple:
    """A phase of a case in which all experts are equally busy. Checks the counts as well."""
    ep, tokens = len(ranks), ranks[0]["tokens"]
    predicted = 2 * predictions.dispatch_bytes(tokens, SHAPE["top_k"], SHAPE["hidden"], ep, beta)
    counts = predictions.counts_bytes(SHAPE["experts"], ep) if phase == "forward" else 0
    log, numbers, sockets = (sum(each[kind][phase] for each in ranks) / ep for kind in ("log", "counts", "sockets"))
    if numbers != counts:
        raise RuntimeError(f"{name}: counts take {numbers} bytes, not {counts}")
    cells = (f"{predicted:,.0f}", f"{log:,.0f}", f"{log / predicted:.4f}", f"{numbers:,.0f}", f"{sockets:,.0f}")
    return (f"{name}: {phase}", *cells, f"{sockets / (log + numbers):.4f}")


def exact_row(name: str, ranks: list[dict], beta: int) -> tuple:
    """Both phases of a case in which the router chooses: the log against the rows that it sends elsewhere."""
    ep, chosen = len(ranks), [each["chosen"] for each in ranks]
    rows = [sum(predictions.exact_rows(chosen, rank)) for rank in range(ep)]  # to other ranks, and back to them
    expected = [2 * SHAPE["hidden"] * beta * each for each in rows]
    log = [sum(each["log"].values()) for each in ranks]
    formula = 4 * predictions.dispatch_bytes(ranks[0]["tokens"], SHAPE["top_k"], SHAPE["hidden"], ep, beta)
    sockets = sum(sum(each["sockets"].values()) for each in ranks)
    everything = sum(log) + sum(sum(each["counts"].values()) for each in ranks)
    cells = (f"{formula:,.0f}", f"{min(log):,}", f"{max(log):,}", f"{sum(log) / ep / formula:.4f}")
    return (name, *cells, "yes" if log == expected else "NO", f"{sockets / everything:.4f}")


def large_models() -> None:
    """PREDICTED: what a layer of a large model sends, if experts are equally busy."""
    tokens, rows = 4096, []
    for name in ("mixtral-8x7b", "deepseek-v3-like"):
        model = PRESETS[name]
        for ep in (each for each in (8, 32, 64) if model.experts % each == 0):
            size = predictions.dispatch_bytes(tokens, model.top_k, model.hidden, ep, 2) / 1e6
            once = predictions.distinct_ranks(model, ep) / (model.top_k * (ep - 1) / ep)
            layers = model.layers - model.dense_layers
            cells = (f"{2 * size:.0f}", f"{4 * size:.0f}", f"{4 * size * layers / 1e3:.1f}", f"{once:.2f}")
            rows.append((f"{name}, ep {ep}", *cells))
    header = ("", "forward, MB", "forward + backward, MB", "all layers, GB", "if sent once to each rank, times")
    print_table(f"predicted: sent by a rank for one layer, {tokens:,} tokens on a rank, bfloat16", header, rows)


# ---- every token arrives ---------------------------------------------------------------------------------------------


def preserved(quick: bool) -> None:
    """Tokens preserved: rows sent and received, and the layer's output and gradients against one process."""
    shape, rows = SHAPE | {"dtype": "float64", "hidden": 64}, []
    layouts = LAYOUTS[:2] if quick else LAYOUTS
    batches = {ranks // tp for ranks, tp in layouts}
    cases = [shape | {"micro_batch": shape["micro_batch"] * size} for size in sorted(batches)]
    alone = dict(zip(sorted(batches), on_ranks(1, on_every_case, compute, cases, title="one process")[0]))
    for ranks, tp in layouts:
        of_ranks = [each[0] for each in on_ranks(ranks, on_every_case, compute, [shape | {"ep": ranks, "tp": tp}])]
        whole = alone[ranks // tp]
        choices = shape["top_k"] * sum(each["tokens"] for each in of_ranks)
        sent, received = (sum(each[kind] for each in of_ranks) for kind in ("sent", "received"))
        cells = [f"{relative(whole[kind], joined(of_ranks, kind, tp)):.1e}" for kind in ("y", "dx")]
        weights = torch.cat([each["dw"] for each in of_ranks])
        sums = [sum(each["y"].sum().item() for each in found) for found in ([whole], of_ranks)]
        cells += [f"{relative(whole['dw'], weights):.1e}", f"{sums[0]:.9f}", f"{sums[1]:.9f}"]
        busiest = max(each["received"] for each in of_ranks) * ranks / choices
        name = f"ep {ranks}" + f", tp {tp}" * (tp > 1)
        rows.append((name, f"{choices:,}", f"{sent:,}", f"{received:,}", f"{busiest:.2f}", *cells))
    header = ("", "k x tokens", "rows sent", "received", "busiest rank / mean")
    header += ("output", "gradient of x", "of experts", "sum of y, one process", "ep ranks")
    print_table("rows of all ranks, and the largest ||a - b|| / ||b|| against one process (float64)", header, rows)


def compute(mesh: Mesh, flags: dict) -> dict:
    """On a rank: rows sent to experts and received by them; the output, and gradients of tokens and of experts."""
    layer, received = ExpertLayer(mesh, **flags), []
    layer.layer.experts.register_forward_pre_hook(lambda module, inputs: received.append(len(inputs[0])))
    with record() as calls:
        layer.forward()
    layer.backward()
    dispatch = [call.elements // layer.x.shape[-1] for call in calls if call.dtype != "int64"][:1]
    result = {"tokens": layer.tokens, "sent": sum(dispatch), "received": sum(received)}
    result |= {"y": layer.y.detach(), "dx": layer.x.grad, "dw": layer.layer.experts.down_proj.grad}
    return result


def joined(ranks: list[dict], kind: str, tp: int) -> torch.Tensor:
    """The parts of all ranks, (batch, seq, h): tensor ranks are neighbors and have parts of the same sequences."""
    parts = [each[kind] for each in ranks]
    return torch.cat([torch.cat(parts[first : first + tp], 1) for first in range(0, len(parts), tp)])


def relative(expected: torch.Tensor, found: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()
