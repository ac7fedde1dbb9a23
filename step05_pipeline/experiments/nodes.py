"""What may cross nodes? Two nodes of two ranks, joined by a slow cable, and the same model divided in three ways."""

import statistics
import time

from common import collectives
from common.errors import UsageError
from common.experiments import tcp_bytes
from common.experiments.nodes import value_of
from common.experiments.on_nodes import on_nodes
from common.experiments.tables import compared, print_table
from common.process_groups import Mesh
from step05_pipeline.experiments.tools import Run
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.simulator import Costs, simulate

NODES = RANKS = 2  # nodes, and ranks on each
CABLE = "20mbit"
MODEL = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 256, "vocab": 256, "data": "synthetic"}
MODEL |= {"seq_len": 128, "micro_batch": 1, "global_batch": 8, "warmup": 1}
LAYOUTS = {
    "tp inside, pp across": {"tp": 2, "pp": 2},
    "tp inside, dp across": {"tp": 2, "dp": 2},
    "tp across": {"tp": 4},
}
# What crosses the cable in each direction for every byte of the tensor, when 2 of 4 ranks are on either side: of a ring
# (all-reduce), of an all-to-all (reduce-scatter on gloo) and of four broadcasts (all-gather on gloo)
CROSSES = {"all_reduce": 1.5, "reduce_scatter": 1.0, "all_gather": 1.25}
# Bytes on the cable for each that TCP carries in packets of 1448: headers, and an answer to every other packet
PACKET = (1514 + 66 / 2) / 1448


def nodes(quick: bool) -> None:
    """Two nodes, a slow cable: bytes that cross it and the time of a step, with tp, dp or pp across."""
    repeats, cases = 1 if quick else 3, [MODEL | flags for flags in LAYOUTS.values()]
    try:
        free = on_nodes(NODES, RANKS, steps, cases, repeats)
        slow = on_nodes(NODES, RANKS, steps, cases, repeats, bandwidth=CABLE)
    except UsageError as error:
        print(f"  left out: {error}")
        return
    rows, tokens = [], MODEL["global_batch"] * MODEL["seq_len"]
    for index, (name, flags) in enumerate(LAYOUTS.items()):
        without, ranks = free[0][index]["seconds"], [part[index] for part in slow]
        sent = PACKET * sum(each["crossing"] for each in ranks[:RANKS])  # by the ranks of the first node
        on_cable = sent / (value_of(CABLE) / 8)
        predicted, measured = predict(flags, without, on_cable), ranks[0]["seconds"]
        cells = (*compared(sent, ranks[0]["sent"], ".2f", 1e6), f"{without:.2f}", f"{on_cable:.2f}")
        rows.append((name, *cells, *compared(predicted, measured, ".2f"), f"{tokens / measured:,.0f}"))
    header = ("", "predicted, MB", "measured", "ratio", "s without limit", "s on the cable")
    title = f"{NODES} nodes of {RANKS} ranks, a cable of {CABLE}: sent by a node in a step, and the step's time"
    print_table(title, (*header, "predicted, s", "measured", "ratio", "tokens/s"), rows)


def predict(flags: dict, without: float, on_cable: float) -> float:
    """Predicted seconds of a step, from those without a limit and those that its bytes take on the cable.

    Collectives are waited for. Messages of a pipeline travel while ranks work, which the simulator knows.
    """
    if "pp" not in flags:
        return without + on_cable
    m = MODEL["global_batch"] // MODEL["micro_batch"]
    schedule = build_schedule("1f1b", flags["pp"], m)
    unit = without / simulate(schedule, Costs(F=1, I=1, W=1)).makespan
    return simulate(schedule, Costs(F=unit, I=unit, W=unit, communication=on_cable / m)).makespan


def steps(mesh: Mesh, cases: list[dict], repeats: int) -> list[dict]:
    """On a rank: for each case the median time of a step's gradients, and the bytes that its node sent for them.

    `crossing` is what theory says that this rank's part of the bytes is.
    """
    found = []
    for flags in cases:
        run, times = Run(mesh, **flags), []
        with collectives.record() as calls:
            run.gradients()
        collectives.barrier(mesh.world)
        before = tcp_bytes.sent_through("cable")
        for _ in range(repeats):
            collectives.barrier(mesh.world)
            start = time.perf_counter()
            run.gradients()
            collectives.barrier(mesh.world)
            times.append(time.perf_counter() - start)
        sent = (tcp_bytes.sent_through("cable") - before) / repeats
        crossing = sum(crosses(call, run.mesh) for call in calls)
        found.append({"seconds": statistics.median(times), "sent": sent, "crossing": crossing})
        collectives.barrier(mesh.world)  # all have read their counters
    return found


def crosses(call: collectives.Call, mesh: Mesh) -> float:
    """Bytes that a rank's part of a collective, or its message, sends over the cable."""
    ranks = getattr(mesh, call.group).ranks
    if len({rank // RANKS for rank in ranks}) == 1:
        return 0.0
    if len(ranks) == 2:
        return call.bytes
    whole = call.elements * (4 if call.dtype == "float32" else 8)
    whole *= len(ranks) if call.op == "all_gather" else 1  # its call names the part
    return CROSSES[call.op] * whole / RANKS
