"""What may cross nodes? Two nodes of two ranks, joined by a slow cable, and the same model divided in three ways."""

from common import collectives
from common.drawing.figures import COLOURS, SERIES, new_figure, save_figure
from common.drawing.tables import compared, print_table
from common.errors import UsageError
from common.experiments.on_nodes import HEADER, NODES, RANKS, compared_cells, crosses, on_nodes, seconds_on, timed
from common.experiments.tcp_bytes import PACKET
from common.process_groups import Mesh
from step05_pipeline.experiments.tools import Run
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.simulator import Costs, simulate

CABLE = "20mbit"
MODEL = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 256, "vocab": 256, "data": "synthetic"}
MODEL |= {"seq_len": 128, "micro_batch": 1, "global_batch": 8, "warmup": 1}
LAYOUTS = {
    "tp inside, pp across": {"tp": 2, "pp": 2},
    "tp inside, dp across": {"tp": 2, "dp": 2},
    "tp across": {"tp": 4},
}


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
        alone, ranks = free[0][index], [part[index] for part in slow]
        sent = sum(each["crossing"] for each in ranks[:RANKS])  # by the ranks of the first node
        predicted = predict(flags, alone["seconds"], seconds_on(CABLE, sent))
        cells = compared_cells(sent, predicted, CABLE, alone, ranks[0])
        rows.append((name, *cells, f"{tokens / ranks[0]['seconds']:,.0f}"))
    title = f"{NODES} nodes of {RANKS} ranks, a cable of {CABLE}: sent by a node in a step, and the step's time"
    print_table(title, (*HEADER, "tokens/s"), rows)


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
    """On a rank: for each case the time of a step's gradients, and the bytes that its node sent for them.

    `crossing` is what theory says that this rank's part of the bytes is.
    """
    found = []
    for flags in cases:
        run = Run(mesh, **flags)
        with collectives.record() as calls:
            run.gradients()
        (result,) = timed(mesh, [run.gradients], repeats)
        found.append(result | {"crossing": sum(crosses(call, run.mesh) for call in calls)})
    return found


# ---- when messages hide ----------------------------------------------------------------------------------------------

MESSAGE_MS = 40  # of a message on the cable
SLACK = {"layers": 2, "pp": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 192, "vocab": 256, "data": "synthetic"}
SLACK |= {"seq_len": 128, "micro_batch": 1, "global_batch": 8, "warmup": 1}
SWEEP = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)  # time of a message / time of a forward


def slack(quick: bool) -> None:
    """Two nodes, a slow cable: time that messages add to a step while layers get faster, for AFAB and 1F1B."""
    size = SLACK["micro_batch"] * SLACK["seq_len"] * SLACK["hidden"] * 4
    cable = round(8 * PACKET * size / MESSAGE_MS)  # kbit/s
    sweep = (0.5, 2.0) if quick else SWEEP
    keys = [(name, ratio) for name in ("afab", "1f1b") for ratio in sweep]
    cases = [SLACK | {"schedule": name, "layer_delay": MESSAGE_MS / ratio} for name, ratio in keys]
    try:
        found = on_nodes(NODES, 1, steps, cases, 1 if quick else 3, bandwidth=f"{cable}kbit")[0]
    except UsageError as error:
        print(f"  left out: {error}")
        return
    rows, added, m = [], {}, SLACK["global_batch"] // SLACK["micro_batch"]
    for (name, ratio), measured in zip(keys, found):
        forward = MESSAGE_MS / ratio
        free, predicted = (played_on_cable(name, m, ratio * on) * forward for on in (0, 1))
        milliseconds = 1e3 * measured["seconds"]
        rows.append(
            (f"{name}, message = {ratio:g} F", f"{forward:.0f}", f"{free:.0f}", *compared(predicted, milliseconds))
        )
        added[name, ratio] = (milliseconds - free) / MESSAGE_MS
    title = f"a message takes {MESSAGE_MS} ms; {m} micro-batches; a step, ms"
    print_table(title, ("", "F, ms", "without messages", "predicted", "measured", "ratio"), rows)
    draw_slack(added, m)


def played_on_cable(name: str, m: int, message: float) -> float:
    """Time of a step on two ranks in units of a forward, where messages queue for the cable.

    The simulator lets any number of messages travel side by side. Here one that is ready waits for the previous one in
    its direction, which matters if messages take longer than what makes them.
    """
    schedule = build_schedule(name, 2, m)
    ends, free, clock, done = {}, {"forward": 0.0, "backward": 0.0}, [0.0, 0.0], [0, 0]
    while any(done[rank] < len(schedule.actions[rank]) for rank in range(2)):
        for rank in range(2):
            if done[rank] == len(schedule.actions[rank]):
                continue
            action = schedule.actions[rank][done[rank]]
            needed = schedule.input_of(rank, action)
            if needed and needed not in ends:
                continue
            clock[rank] = max(clock[rank], ends.get(needed, 0.0)) + (1 if action.kind == "F" else 2)
            done[rank] += 1
            made = schedule.output_of(rank, action)
            if made.stage == (0 if made.direction == "forward" else 1):  # a message; the others are nobody's input
                free[made.direction] = ends[made] = max(clock[rank], free[made.direction]) + message
    return max(clock)


def draw_slack(added: dict[tuple[str, float], float], m: int) -> None:
    """What the messages of a step add to its time, over their length: measured dots on predicted lines."""
    figure, axis = new_figure(width=7.4, height=4.2)
    fine = [step / 40 for step in range(6, 85)]
    looks = {
        "1f1b": (SERIES[0], "1F1B: every micro-batch waits", 8.6),
        "afab": (SERIES[1], "AFAB: the first waits", 2.8),
    }
    for name, (colour, label, height) in looks.items():
        free = played_on_cable(name, m, 0)
        axis.plot(fine, [(played_on_cable(name, m, x) - free) / x for x in fine], color=colour, linewidth=2)
        dots = [(ratio, value) for (other, ratio), value in added.items() if other == name]
        axis.plot(*zip(*dots), "o", color=colour, markersize=9)
        axis.text(0.17, height, label, fontsize=12.5, fontweight="bold", color=colour)
    axis.axvspan(1, fine[-1], color=COLOURS["idle"], zorder=0)
    axis.text(0.97, 0.4, "the condition holds", ha="right", fontsize=12)
    axis.text(1.03, 0.4, "it does not", ha="left", fontsize=12)
    axis.set(xlim=(fine[0], fine[-1]), ylim=(0, 10))
    axis.set_xlabel("length of a message, in forwards", fontsize=12)
    axis.set_ylabel("waiting in a step, in messages", fontsize=12)
    save_figure(figure, "slack")
