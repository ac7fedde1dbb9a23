"""A sweep whose runs fail in every way ends with a complete table, and a calibration ranks runs."""

import json
import os
import re
import signal
import sys

import pytest

from common.launching.process_tree import marked, new_mark
from step05_pipeline.schedules.catalogue import SCHEDULES, build_schedule
from step05_pipeline.schedules.simulator import Costs, simulate
from step08_5d.planning.__main__ import main
from step08_5d.planning.fitting import kendall, nonnegative_least_squares
from step08_5d.planning.sweeps import calibration, sweep
from step08_5d.planning.sweeps.calibration import LayoutWork, Measured, RankWork, Rates
from tests.harness.ranks import wait_for

GRID = """name = "test"
timeout = 4
world = [2]
flags = "--data synthetic --steps 4"

[[grid]]
micro_batch = [1, 2, 4]

[[grid]]
pp = [2, 3]
sequence_parallel = [true]

[[grid]]
lr = [1e20]
"""
# What a run does, by its micro-batch; --pp 2 takes all memory, and leaves a rank when its launcher ends
RUN = """import json, pathlib, subprocess, sys, time
flags = dict(zip(sys.argv[1:], sys.argv[2:]))
size, folder = flags.get("--micro-batch"), pathlib.Path(flags["--run-dir"])
if size == "1":
    steps = [{"step_time_s": 9.0 - step, "tokens_per_s": 100.0 * step, "mfu": "NaN"} for step in range(5)]
    steps = [step | {"loss": loss} for step, loss in zip(steps, (5.0, 4.0, 7.0, 3.0, 5.5))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\\n" for each in steps))
elif size == "2":
    sys.exit("ValueError: a bad number")
elif "--lr" in flags:
    sys.exit("error: step 7: grad_norm is nan; the run ends here, and saves nothing of this step")
elif size == "4":
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    rank = {"start_new_session": True, "stdout": subprocess.PIPE}  # as torchrun starts one; this one hangs for good
    subprocess.Popen([sys.executable, "-c", deaf], **rank).stdout.readline()
    (folder / "rank").touch()
    time.sleep(60)
else:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    sys.exit("[rank1]: RuntimeError: DefaultCPUAllocator: can't allocate memory")
"""


@pytest.fixture
def grid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    real = sweep.command

    def stand_in(*arguments) -> list[str]:
        assert real(*arguments)[1:5] == ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
        return [sys.executable, "-c", RUN, *real(*arguments)[7:]]

    monkeypatch.setattr(sweep, "command", stand_in)
    file = tmp_path / "grid.toml"
    file.write_text(GRID)
    return file


@pytest.fixture
def mark(monkeypatch) -> tuple[str, str]:
    """That of all that the test starts."""
    monkeypatch.setenv(*(mark := new_mark()))
    yield mark
    for number in marked(mark):
        os.kill(number, signal.SIGKILL)


def test_every_run_is_recorded(grid, capsys, monkeypatch, mark):
    main(["sweep", str(grid)])
    assert (sweep.read(grid).folder / "ranks-2_micro_batch-4" / "rank").exists(), "the run that hangs had a rank"
    assert wait_for(lambda: not marked(mark), 10) is not None, "ranks stay behind"
    found = {tuple(each["values"].values()): each for each in sweep.records(sweep.read(grid).folder)}
    states = {values: each["status"] for values, each in found.items()}
    pipelines = {(2, True): "out of memory", (3, True): "refused"}
    assert states == pipelines | {(1,): "ok", (2,): "crash", (4,): "hang", (1e20,): "diverged"}
    assert found[1,]["step_time_s"] == 6 and found[1,]["tokens_per_s"] == 300, "medians without the first two"
    assert (found[1,]["loss"], found[1,]["rise"]) == (5.5, 3), "from 4 to 7, then from 3 to 5.5"
    assert found[1e20,]["line"].startswith("step 7: grad_norm is nan")
    assert found[2,]["line"] == "a bad number" and "--pp 3 does not divide" in found[3, True]["line"]
    assert found[4,]["seconds"] < 20
    assert (sweep.read(grid).folder / "heat.png").exists()
    printed = capsys.readouterr().out
    assert "1 of 6 runs ended" in printed and printed.count("hang") == 2

    started = []
    monkeypatch.setattr(sweep, "run", lambda asked, case: started.append(case.values) or found[(2,)])
    main(["sweep", str(grid)])
    assert started == [], "started again, it runs nothing"
    main(["sweep", str(grid), "--again", "crash"])
    assert started == [{"micro_batch": 2}]
    grid.write_text(GRID.replace("--steps 4", "--steps 5"))
    main(["sweep", str(grid)])
    assert len(started) == 1 + 6, "with other flags, these are other runs"


@pytest.mark.parametrize(
    "old, new, line",
    [
        ("world = [2]\n", "", "has no key world"),
        ("timeout", "time_out", "has an unknown key time_out"),
        ("[1, 2, 4]", "4", "every value in a [[grid]] table must be a list"),
        ("world = [2]", "world = [0]", "world must be a list of numbers, each at least 1"),
        ("[1, 2, 4]", "[1]\nnodes = [0]", "world and nodes in a [[grid]] table must be numbers, each at least 1"),
        ("[[grid]]", "[[grid", "cannot read"),
        ("micro_batch = [1, 2, 4]", 'bandwidth = ["50mbit"]', "bandwidth and latency are those between nodes"),
    ],
)
def test_a_bad_file_is_one_line(grid, capsys, old, new, line):
    grid.write_text(GRID.replace(old, new))
    assert main(["sweep", str(grid)]) == 2
    printed = capsys.readouterr().err
    assert line in printed and printed.count("\n") == 1


def test_commands():
    asked = sweep.Sweep("x", "", [16], [])
    case = sweep.SweepRun("a", 16, {}, ["--pp", "2"])
    slurm = sweep.command(asked._replace(launcher="slurm"), case, asked.folder / "a")
    assert slurm[:6] == "sbatch --wait --nodes 2 --gpus-per-node 8".split() and "step08_5d/train.slurm" in slurm
    for world, nodes, of_node in ((2, 1, 2), (12, 2, 6), (20, 4, 5)):
        slurm = sweep.command(asked._replace(launcher="slurm"), case._replace(world=world), asked.folder / "a")
        assert slurm[2:6] == f"--nodes {nodes} --gpus-per-node {of_node}".split(), "as many ranks as the flags are for"
    on_nodes = case._replace(values={"nodes": 2, "bandwidth": "50mbit"})
    nodes = sweep.command(asked, on_nodes, asked.folder / "a")
    words = "-m common.nodes --nodes 2 --bandwidth 50mbit --ranks 8 -- step08_5d/train.py --pp 2 --run-dir"
    assert nodes[1:-1] == words.split()
    assert sweep.refusal(on_nodes._replace(world=3)) == "2 nodes do not divide 3 ranks"


def test_rates_that_made_the_times_are_found_again():
    """Runs whose seconds follow the model are predicted within 3 %, although something has disturbed one of them."""
    true = Rates(3e-11, 2e-5, 2e-9, 2e-4, 1.1, 0.5)
    runs = []
    for n in range(36):
        work = RankWork(1e9 * (1 + n % 5), 1e4 * (1 + n % 3), 1e6 * (1 + n % 11), 50.0 * (n % 4))
        layout = LayoutWork([work] * (1 + n % 2), 4096, 1 + n % 3, 1, 0.5 * (n % 6 == 5), 0.5 * (n % 7 == 6))
        seconds = calibration.seconds(layout, true) * (1.5 if n == 6 else 1)
        runs.append(Measured({"id": str(n), "step_time_s": seconds}, layout))
    rates = calibration.fit(runs[::2])
    found = calibration.judge(runs[1::2], rates)
    assert found.kendall > 0.95 and found.error < 0.03 and found.regret < 0.03
    crowd = LayoutWork([RankWork(0, 0, 0, 3)], 1, turns=2)
    assert calibration.seconds(crowd, Rates(waits=1)) == 6, "four ranks take turns on two cores"
    assert kendall([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    assert kendall([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / 3), "a tie is in no order"
    assert nonnegative_least_squares([[1, 1], [1, 0]], [1, 2], [1, 1]) == pytest.approx([1.5, 0])
    assert nonnegative_least_squares([[1, 1], [1, 0]], [3, 2], [1, 9]) == pytest.approx([2, 1])


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_pipeline_whose_ranks_share_cores(name):
    """With a core each, ranks take what step 5's simulator says; on one core, the sum of what all do."""
    schedule = build_schedule(name, 4, 8)
    works = [sum(Costs().of(each.kind) for each in row) for row in schedule.actions]
    assert calibration.on_cores(schedule, works, 1, 4) == pytest.approx(simulate(schedule).makespan)
    assert calibration.on_cores(schedule, works, 3, 1) == pytest.approx(3 * sum(works))


def test_three_stages_on_two_cores():
    """Where three stages have work (third F of the first, third B of the last) it takes half as long again."""
    schedule = build_schedule("afab", 3, 3)
    assert simulate(schedule).makespan == 15
    assert calibration.on_cores(schedule, [9, 9, 9], 1, 2) == pytest.approx(15 + 0.5 + 1)


def test_another_sweep_judges(grid, monkeypatch, capsys):
    """Rates come of all runs of the first sweep, the judgement of all runs of the second, which has another machine."""
    other = grid.with_name("other.toml")
    other.write_text(grid.read_text().replace('name = "test"', 'name = "other"'))
    ended, sweeps = {"status": "ok", "values": {}, "world": 2, "tokens_per_s": 1.0}, {"test": [], "other": []}
    for n in range(1, 13):
        layout = LayoutWork([RankWork(1e9 * n, 1e4 * (n % 3), 1e6 * (n % 4), 9.0 * (n % 2))], 4096)
        for name, slower in (("test", 1.0), ("other", 1.25)):
            seconds = slower * calibration.seconds(layout, Rates())
            sweeps[name].append(Measured(ended | {"id": str(n), "step_time_s": seconds}, layout))
    del sweeps["other"][10:]
    monkeypatch.setattr(calibration, "measured", lambda asked, cores: sweeps[asked.name])
    assert not main(["calibrate", str(grid), "--judge", str(other)])
    printed = capsys.readouterr().out
    assert re.search(r"all of test +10 +1\.00 +20% +0%", printed) and "the fit has seen" not in printed
    assert not main(["calibrate", str(grid)])
    assert re.search(r"the last third +8 +1\.00 +0% +0%", capsys.readouterr().out)
    sweeps["other"] = []
    assert main(["calibrate", str(grid), "--judge", str(other)]) == 2
    assert "has no run that ended" in capsys.readouterr().err


def test_what_crosses_the_cable():
    """Two nodes of two ranks. `tp` within them: of the four gradients' ring, two messages cross. Across them: all."""
    model = "--layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 128 --vocab 256 --seq-len 64 --global-batch 8".split()
    nodes, tp, pp = {"nodes": 2, "bandwidth": "8mbit"}, "--dp 2 --tp 2", "--pp 2 --dp 2"
    cases = ("--dp 4", tp, f"{tp} --order dp,cp,pp,tp", f"{pp} --order tp,cp,dp,pp")
    found = [calibration.work_of_layout([*model, *each.split()], 4, nodes, 2) for each in cases]
    work, inside, across, stages = (each.stages[0] for each in found)
    assert work.behind == pytest.approx(work.sent / 2, rel=1e-3) and work.far < 100
    assert found[0].behind == pytest.approx(2 * work.behind / 1e6), "a node has two ranks"
    assert inside.behind > 0 and inside.far < 100 and across.far > 1e5 and across.behind == 0
    assert stages.far == pytest.approx(2 * 2 * 64 * 64 * 4, rel=1e-2), "two micro-batches to the next stage"
    late = calibration.work_of_layout([*model, *tp.split()], 4, nodes | {"latency": "10ms"}, 2)
    assert late.cable == pytest.approx(found[1].cable + 0.01 * inside.hops) and inside.hops < 20
    assert calibration.share_between_nodes([0, 0, 1, 1], "pp_forward", "send") == pytest.approx(1 / 3)
    assert calibration.share_between_nodes([0, 0, 1, 1], "tp", "all_gather") == pytest.approx(2 / 3)


def test_repetitions_bound_the_model(tmp_path):
    def runs(*speeds):
        return [{"status": "ok", "tokens_per_s": speed} for speed in speeds]

    found = calibration.scatter({"a": runs(9, 1, 2), "b": runs(4, 4), "c": runs(3, 3), "d": runs(7)})
    assert (found.runs, found.error, found.kendall) == (3, 0, 1)
    assert calibration.scatter({"a": runs(1, 2)}) is None
    records = [("a", "ok", 3), ("b", "hang", 0), ("a", "ok", 2), ("a", "crash", 1), ("b", "ok", 4)]
    records.append(("a", "ok", 2.5))  # the newest is not the fastest, nor is the oldest
    lines = [json.dumps({"id": name, "status": status, "step_time_s": time}) for name, status, time in records]
    both = [
        {"id": "c", "status": "ok", "flags": ["--lr", rate], "step_time_s": time} for rate, time in (("1", 1), ("2", 5))
    ]
    lines += map(json.dumps, both)  # the first one is another run's, of other flags
    (tmp_path / "runs.jsonl").write_text("\n".join(lines))
    assert [each["step_time_s"] for each in sweep.fastest(tmp_path)] == [2, 4, 5]


def test_laptop_is_accepted():
    asked = sweep.read("step08_5d/planning/laptop.toml")
    lines = [sweep.refusal(case) for case in sweep.cases(asked)]
    assert lines.count("") >= 45 and all("divide the world" in line for line in lines if line), json.dumps(lines)
    assert not any(sweep.refusal(case) for case in sweep.cases(sweep.read("step08_5d/planning/crossing.toml")))
