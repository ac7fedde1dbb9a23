"""What may cross nodes? Two nodes of two ranks, joined by a slow cable, and the same model divided in three ways."""

from common.drawing.figures import COLOURS, SERIES, new_figure, save_figure
from common.experiments.on_nodes import Found, Workload, two_nodes
from common.experiments.tcp_bytes import PACKET
from common.experiments.training_step import Training, checked
from common.process_groups import Mesh
from step05_pipeline import train
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
    cases, tokens = {name: MODEL | flags for name, flags in LAYOUTS.items()}, MODEL["global_batch"] * MODEL["seq_len"]
    for name, found in two_nodes("a step", step, cases, predict, CABLE, repeats=1 if quick else 3).items():
        print(f"  {name}: {tokens / found.slow:,.0f} tokens/s")


def step(mesh: Mesh, flags: dict) -> Workload:
    """On a rank: the gradients of a step."""
    run = Training(train, *checked(mesh, **flags))
    return Workload(run.gradients, run.mesh)


def predict(flags: dict, found: Found) -> float:
    """Predicted seconds of a step, from those without a limit and those that its bytes take on the cable.

    Collectives are waited for. Messages of a pipeline travel while ranks work, which the simulator knows.
    """
    on_cable = sum(found.on_cable.values())
    if "pp" not in flags:
        return found.free + on_cable
    m = flags["global_batch"] // flags["micro_batch"]
    if "layer_delay" in flags:  # messages queue for the cable
        return 1e-3 * flags["layer_delay"] * played_on_cable(flags["schedule"], m, MESSAGE_MS / flags["layer_delay"])
    schedule = build_schedule("1f1b", flags["pp"], m)
    unit = found.free / simulate(schedule, Costs(F=1, I=1, W=1)).makespan
    return simulate(schedule, Costs(F=unit, I=unit, W=unit, communication=on_cable / m)).makespan


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
    cases = {
        f"{name}, message = {ratio:g} F": SLACK | {"schedule": name, "layer_delay": MESSAGE_MS / ratio}
        for name, ratio in keys
    }
    title = f"a message takes {MESSAGE_MS} ms; a step"
    found = two_nodes(title, step, cases, predict, f"{cable}kbit", ranks=1, repeats=1 if quick else 3)
    if not found:
        return
    added, m = {}, SLACK["global_batch"] // SLACK["micro_batch"]
    for (name, ratio), result in zip(keys, found.values()):
        free = played_on_cable(name, m, 0) * MESSAGE_MS / ratio
        added[name, ratio] = (1e3 * result.slow - free) / MESSAGE_MS
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
        "1f1b": (SERIES[0], "1F1B: every round waits", 8.6),
        "afab": (SERIES[1], "AFAB: two messages in all", 1.25),
    }
    for name, (colour, label, height) in looks.items():
        free = played_on_cable(name, m, 0)
        axis.plot(fine, [(played_on_cable(name, m, x) - free) / x for x in fine], color=colour, linewidth=2)
        dots = [(ratio, value) for (other, ratio), value in added.items() if other == name]
        axis.plot(*zip(*dots), "o", color=colour, markersize=9)
        axis.text(0.17, height, label, fontsize=12.5, fontweight="bold", color=colour)
    axis.axvspan(1, fine[-1], color=COLOURS["idle"], zorder=0)
    axis.text(0.97, 0.4, "message faster than a forward", ha="right", fontsize=12)
    axis.text(1.03, 0.4, "message slower than a forward", ha="left", fontsize=12)
    axis.set(xlim=(fine[0], fine[-1]), ylim=(0, 10))
    axis.set_xlabel("length of a message, in forwards", fontsize=12)
    axis.set_ylabel("waiting in a step, in messages", fontsize=12)
    axis.set_title(f"two ranks, {m} micro-batches: lines predicted, dots measured", fontsize=12, loc="left")
    save_figure(figure, "slack")
