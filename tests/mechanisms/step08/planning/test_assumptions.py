"""What a plan assumes of a model and a machine, and what decides between layouts that are equally fast."""

from argparse import ArgumentParser

import pytest

from common.counts import count_parameters
from common.presets import PRESETS, resolve
from step08_5d.cost import Layout
from step08_5d.planning.__main__ import main
from step08_5d.planning.command_line import add_gpu, machine_of
from step08_5d.planning.explain import assumed
from step08_5d.planning.search import Candidate, Task, plans
from step08_5d.planning.time.machines import MACHINES
from step08_5d.planning.time.profiles import PROFILES, TUNED
from tests.harness.ranks import ROOT

LLAMA = PRESETS["llama3-8b"]


def task(name: str, gpus: int, seq: int = 4096, sequences: int = 256) -> Task:
    return Task(name, PRESETS[name], gpus, seq, sequences, MACHINES["H100"])


@pytest.mark.parametrize(
    "words, line",
    [
        (
            "--gpu a100 --memory 40 --between 3.125",
            "8 A100: 312 TFLOP/s, 40 GB, 300 GB/s within a node of 8, 3.125 GB/s a",
        ),
        ("--gpu H800 --within 400", "warning: --within 400 is more than the data sheet's 200"),
        (
            "--bus-bandwidth 480",
            "480 GB/s a node, measured, between nodes\n  warning: --bus-bandwidth 480 is more than",
        ),
    ],
)
def test_what_is_assumed_is_printed(words, line, capsys):
    """Of the model, too, so that a slip in its file shows: 30 layers, 9 heads, 3 of them of keys."""
    main(
        ["plan", "--model", "smollm-135m", "--gpus", "8", "--seq-len", "1k", "--tokens-per-batch", "8k", *words.split()]
    )
    printed = capsys.readouterr().out
    model = (
        "0.135 B parameters, 30 layers, hidden 576, 9 heads of 64, 3 K/V heads, ffn 1,536, vocabulary 49,152, tied\n"
    )
    assert printed.startswith(f"smollm-135m: {model}8 {words.split()[1].upper() if '--gpu' in words else 'H100'}: ")
    assert line in printed


def test_bytes_to_other_nodes():
    """Two nodes: sums of gradients (4 bytes to reduce, 2 to gather) go over the cards of all 8 ranks on a node, or over
    that of one. Of a pipeline, a rank sends its stream; in a ring of 16, keys and values over one card."""
    mine = task("llama3-8b", 16, sequences=16)
    params = count_parameters(LLAMA).total
    stream = 4096 * 4096 * 2

    def sent(**ways) -> tuple[float, float]:
        return Candidate(Layout(4096, dtype="bfloat16", **ways), {}, {}, {}).sent(mine)

    whole, far = sent(dp=16, zero=1)
    assert whole == pytest.approx(15 / 16 * 6 * params, rel=1e-3) and far == pytest.approx(whole / 8)
    assert sent(dp=8, zero=1)[1] == 0 and sent(tp=8)[1] == 0
    whole, far = sent(dp=8, tp=2, zero=1, micro_batches=2)
    assert far == pytest.approx(7 / 8 * 6 * params / 2 / 4, rel=1e-3) and far < whole / 4
    assert sent(pp=16, micro_batches=16)[1] == pytest.approx(16 * 2 * stream)
    ring = sent(cp=16)[0] - sent(dp=16, zero=0)[0]
    assert sent(cp=16)[1] == pytest.approx(ring + sent(dp=16)[0] / 8) and ring > 0


def test_of_equal_layouts_the_one_with_fewest_bytes_between_nodes():
    """Then the one that holds least, and not the one that sends least within nodes."""
    for mine in (task("llama3-8b", 16, sequences=64), task("llama3-8b", 8, sequences=64)):
        mine = mine._replace(profiles=(PROFILES["megatron"],))
        found = plans(mine)[0]
        fastest = min(plan.regret for plan in found)
        equal = [plan for plan in found if 1 + plan.regret <= 1.01 * (1 + fastest)]
        keys = [(plan.sent(mine)[1], sum(plan.held.values())) for plan in equal]
        assert len(equal) > 1 and keys[0] == min(keys)


def test_what_is_assumed_of_experts():
    words = assumed("mixtral", PRESETS["mixtral-8x7b"])
    assert "46.7 B parameters (12.9 B active), 8 experts of 14,336 (2 a token, 0 shared)" in words
    assert words.endswith("routing is assumed to be balanced, and small products as fast as large ones")


def test_the_lessons_model_of_ones_own(tmp_path, capsys):
    """Its file is read; of another type, the line says what a plan can do with."""
    page = (ROOT / "step08_5d/planning/README.md").read_text()
    file, text = tmp_path / "config.json", page.split("```json\n")[1].split("```")[0]
    file.write_text(text)
    assert count_parameters(resolve(str(file))).total == pytest.approx(14.8e9, rel=0.01)
    file.write_text(text.replace('"hidden_size": 5120, ', ""))
    assert main(["plan", "--model", str(file), "--gpus", "8"]) == 2
    assert capsys.readouterr().err.endswith("above 0 for hidden_size, which is missing\n"), (
        "before a default is checked"
    )
    file.write_text(text.replace(', "max_position_embeddings": 40960', ""))
    assert main(["plan", "--model", str(file), "--gpus", "8"]) == 2
    assert "exceeds the 2048 positions of " in (line := capsys.readouterr().err) and "without it, transf" in line
    file.write_text(text.replace("llama", "qwen3"))
    assert main(["plan", "--model", str(file), "--gpus", "8"]) == 2
    line = capsys.readouterr().err
    assert "has model_type qwen3, which this decoder does not have; a plan can do with a config.json" in line


def test_a_node_that_gives_a_part_is_named():
    assert "50 nodes give 5 of their 8 GPUs each; 248 or 256 are whole nodes" in MACHINES["H100"].words(250)
    assert "nodes give" not in MACHINES["H100"].words(256) + MACHINES["H100"].words(6)


def test_less_memory_fits_less():
    mine = task("llama3-8b", 16, 2048, 64)._replace(profiles=(TUNED,))
    parser = ArgumentParser()
    add_gpu(parser)
    of_40 = machine_of(parser.parse_args(["--gpu", "a100", "--memory", "40"]))
    assert of_40 == MACHINES["A100"]._replace(memory=40e9)
    fitting = [sum(plan.held.values()) for plan in plans(mine._replace(machine=of_40))[0]]
    assert 34e9 < max(fitting) <= 36e9
