"""A forward and a backward that take turns: who runs when, and what DualPipe's pairs make of it."""

from itertools import pairwise

import pytest
import torch

from common import collectives
from common.errors import UsageError
from common.tracing.chrome_trace import read_trace
from common.tracing.tracer import Tracer
from step05_pipeline.schedules.actions import Action
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.further.csv_files import write_csv
from step05_pipeline.schedules.simulator import runs_as_one
from step05_pipeline.schedules.validator import check_programs
from step07_expert_parallel import overlap
from tests.harness.observing import configure, watching
from tests.harness.ranks import run_ranks, steps_of
from tests.parity.runs import SMALL, train_here


@pytest.mark.parametrize("failing", ["", "f1", "b1"])
def test_tasks_take_turns_in_one_order(failing):
    """A task keeps its phase over the other one's turn; an error of either is raised, and ends both."""
    cpu, seen = torch.device("cpu"), []
    turns = overlap.Turns(cpu, Tracer())

    def steps(name: str, count: int) -> None:
        collectives.phase = name
        for step in range(count):
            turns.switch()
            seen.append(f"{collectives.phase}{step}")
            if seen[-1] == failing:
                raise MemoryError

    try:
        turns.run(lambda: steps("f", 2), lambda: steps("b", 4))
        assert not failing
    except MemoryError:
        assert failing
    whole = ["f0", "b0", "f1", "b1", "b2", "b3"]
    assert seen == whole[: whole.index(failing) + 1 if failing else None]


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_no_message_comes_between_a_pair(name, ranks):
    schedule = build_schedule(name, ranks, 2 * ranks, None, None)
    programs = overlap.programs_of_pairs(schedule)
    check_programs(schedule, programs)
    pairs = 0
    for actions, program in zip(schedule.actions, programs, strict=True):
        assert [each for each in program if isinstance(each, Action)] == list(actions)
        for first, second in pairwise(actions):
            pairs += runs_as_one(first, second)
            assert not runs_as_one(first, second) or program.index(second) == program.index(first) + 1
    assert pairs >= 2 * (ranks - 1)


def phases(flags: str) -> list[str]:
    """The phase of each all-to-all that a rank issues, and "pair" where a pair begins."""
    marked = []

    def launched(_, calls, __):
        marked.extend(call.phase for call in calls if call.op == "all_to_all")

    pairs = watching(overlap.Turns, "run", lambda *_: marked.append("pair"))
    with pairs, collectives.record(launched=launched):
        train_here(7, flags)
    return marked


EXPERTS = "--layers 4 --steps 1 --micro-batch 1 --experts 4 --expert-ffn 16 --ep 2 --pp 2"


def test_forward_and_backward_alternate(tmp_path):
    """Also by a table, whose comment asks for it."""
    write_csv(build_schedule("dualpipe", 2, 6), tmp_path / "own.csv")
    together = run_ranks(4, phases, f"{SMALL} {EXPERTS} --schedule-file {tmp_path / 'own.csv'}")[0]
    first = {after for before, after in pairwise(together) if before == "pair"}
    assert first == {"backward"}, "the forward's attention hides the backward's first all-to-all"
    together = [phase for phase in together if phase != "pair"]
    changes, pairs = sum(a != b for a, b in pairwise(together)), len(together)
    assert changes > pairs / 4, (changes, pairs)


# F1.1 and B0 of rank 0 run as one, but B0 needs the gradient from rank 1, which first needs the output of F1.1
STUCK = "# overlapped: yes\nF0,F0.1,F1,B0.1,F1.1,B0,B1.1,B1\nF0,F0.1,B0.1,F1,F1.1,B0,B1.1,B1\n"


def test_pairs_that_would_wait_for_each_other_are_refused(tmp_path):
    """They are fine where they do not run as one: without experts on several ranks."""
    (tmp_path / "own.csv").write_text(STUCK)
    flags = f"{SMALL} {EXPERTS} --global-batch 4 --schedule-file {tmp_path / 'own.csv'}"
    configure(7, flags.replace("--ep 2", ""), 4)
    with pytest.raises(UsageError, match="deadlock: rank 0 at F1.1, rank 1 at F1.1 wait forever"):
        configure(7, flags, 4)


DELAY = 0.02
DELAYED = f"{SMALL} --steps 1 --global-batch 4 --experts 4 --expert-ffn 16 --schedule dualpipev --ep 2 --dp 2"


def test_a_rank_computes_one_thing_at_a_time(tmp_path):
    """Delays of two tasks add up, and in the trace a task's spans leave out the other one's."""
    run_ranks(2, train_here, 7, f"{DELAYED} --layer-delay {1e3 * DELAY} --trace 0:0 --run-dir {tmp_path}")
    micro_batches, layers = 2, 2
    (step,), spans = steps_of(tmp_path), read_trace(tmp_path).spans[0]
    assert step["step_time_s"] >= micro_batches * layers * 3 * DELAY  # a backward takes twice as long as a forward
    actions = [each for each in spans if each["cat"] == "phase" and "action" in each["args"]]
    assert len(actions) > 2 * micro_batches * layers, "actions of a pair have several spans"
    times = sorted((each["ts"], each["ts"] + each["dur"]) for each in actions)
    assert all(start >= end for (_, end), (start, _) in pairwise(times))
