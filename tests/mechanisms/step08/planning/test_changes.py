"""What would change a plan: conditions, interleaved stages, a model of another shape."""

import pytest

from common.launching.command_line import parse
from common.presets import PRESETS
from step08_5d.cost import Layout
from step08_5d.planning import changes, explain
from step08_5d.planning.__main__ import main
from step08_5d.planning.published.others import read_runs
from step08_5d.planning.search import Task, plans
from step08_5d.planning.time.machines import MACHINES
from step08_5d.planning.time.profiles import PROFILES
from step08_5d.planning.time.speed import times

LLAMA, H100 = PRESETS["llama3-8b"], MACHINES["H100"]


def task(gpus: int, sequences: int) -> Task:
    return Task("llama3-8b", LLAMA, gpus, 4096, sequences, H100)


def test_what_would_change_a_plan():
    """None of these makes a plan faster; the plan to run then has the least regret of all, of all profiles."""
    mine, best = task(16, 64), plans(task(16, 64))[0]
    for condition, change in zip(changes.CONDITIONS, changes.changes(mine, best), strict=True):
        seconds = {each: [condition.seconds(mine, plan, each) for plan in best] for each in mine.profiles}
        for profile, after in seconds.items():
            assert all(each >= (1 - 1e-12) * plan.seconds[profile.name] for each, plan in zip(after, best))
        regrets = [max(each / min(seconds[by]) for by, each in zip(seconds, row)) for row in zip(*seconds.values())]
        assert change.words == condition.words and change.first == pytest.approx(regrets[0] - 1)
        assert 1 + change.regret == pytest.approx(regrets[best.index(change.winner)])
        assert 1 + change.regret <= 1.01 * min(regrets)


def test_plan_takes_flags_of_the_models_shape(capsys):
    words = "plan --model llama3-1b --gpus 8 --tokens-per-batch 256k --profile fsdp --experts 8 --top-k 2 --layers 8"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "half the bandwidth" in printed and "late" not in printed, "messages are late in nanotron's pipelines only"
    config = parse(8, printed.strip().splitlines()[-1].split("train.py ")[1].split())
    model = config.model_config
    assert (model.experts, model.top_k, model.layers) == (8, 2, 8) and "8 experts of 8,192 (2 a token" in printed
    assert main([*words.split(), "--zero", "1"]) == 2 and "--zero: of step 8's flags" in capsys.readouterr().err
    assert main([*words.split(), "--shwon", "1"]) == 2 and "--shwon is not a flag" in capsys.readouterr().err


def test_what_interleaving_would_change():
    """On 48 GPUs, 3 divides the stages of all pipelines, and not 64 sequences: a batch near it allows interleaving."""
    mine = task(48, 64)._replace(profiles=(PROFILES["megatron"],))
    best = plans(mine)[0]
    found = changes.interleaving(mine, best)
    assert best[0].layout.pp % 3 == 0 and 1 <= len(found) <= 2
    for words, first, winner, regret in found:
        batch, layout = int(words.split()[0]), winner.layout
        assert layout.stages > 1 and layout.micro_batches % layout.pp == 0 and words.endswith("interleaved stages")
        assert batch == layout.dp * layout.micro_batches * layout.micro_batch != 64 and 56 <= batch <= 72
        by_sequence = times(LLAMA, layout, H100, PROFILES["megatron"]).step / batch
        assert (
            regret == 0 and first == pytest.approx(best[0].seconds["megatron"] / 64 / by_sequence - 1) and first > 0.05
        )


def test_interleaving_of_the_batch_that_is_asked_for():
    """As fast as what --interleaved finds, within 1 %; with it nothing more is tried."""
    mine = task(12, 48)._replace(profiles=(PROFILES["megatron"],))
    (change,) = changes.interleaving(mine, plans(mine)[0])
    best = plans(mine._replace(interleaved=True))[0]
    fastest = min(plan.seconds["megatron"] for plan in best)
    assert change.words == "interleaved stages"
    assert change.winner.seconds["megatron"] == pytest.approx(fastest, rel=0.01)


def test_interleaving_that_finds_nothing_says_so(capsys):
    words = "plan --model llama3-8b --gpus 24 --tokens-per-batch 256k --profile megatron"
    assert main([*words.split(), "--interleaved"]) == 0
    assert "None that fits is interleaved: the ranks of a pipeline have to divide" in capsys.readouterr().out


def test_degrees_of_a_published_run_and_interleaving_are_told(capsys):
    """The first run has other degrees than the plan, and the best plan with these is its row. What interleaving gains
    is a line if it is more than 5 %, of the batch that is asked for."""
    mine = task(16, 64)
    best = plans(mine)[0]
    run = read_runs()[0]._replace(layout=Layout(4096, dp=4, tp=4, micro_batches=4))
    explain.print_neighbours(best, [run])
    (row,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith(f"  degrees of {run.system} ")]
    same = next(plan for plan in best if explain.degrees(plan.layout) == (4, 4, 1, 1, 1))
    assert row.endswith(explain.named(same.layout))
    for words, gain, told in (
        (changes.INTERLEAVED, 0.06, True),
        (changes.INTERLEAVED, 0.04, False),
        (f"9 {changes.INTERLEAVED}", 0.1, False),
    ):
        explain.print_regrets(mine, best, "", [changes.Change(words, 0.01 + gain, best[1], 0.01)])
        line = f"  with --interleaved: about +1% at worst instead of {0.01 + gain:+.0%}\n"
        assert (line in capsys.readouterr().out) == told
