"""What the playbook publishes, beside what our formulas print of it: where they agree, and its errata, by number."""

import itertools

import pytest
import torch

from common.counts import count_flops, count_parameters
from common.presets import PRESETS
from step01_single_gpu.cost import states
from step01_single_gpu.experiments import playbook
from step01_single_gpu.memory_model import gpt
from step01_single_gpu.memory_model.peak import predict_peak
from step03_zero import cost as zero
from step03_zero.experiments import cluster as zero_cluster
from step04_tensor_parallel.experiments import memory as tensor_memory
from step05_pipeline import cost as pipeline
from step05_pipeline.experiments import cluster as pipeline_cluster
from step05_pipeline.experiments import memory as pipeline_memory
from step08_5d import cost
from step08_5d.experiments import cluster, memory_8b
from tests.harness.observing import configure

LLAMA, GIB = PRESETS["llama3-8b"], 2**30


@pytest.fixture
def printed(monkeypatch):
    """The rows of all tables that an experiment prints, by their first cell."""

    def rows_of(module, experiment, *arguments) -> dict[str, tuple]:
        found = {}
        monkeypatch.setattr(
            module, "print_table", lambda title, header, rows: found.update((r[0], r[1:]) for r in rows)
        )
        experiment(*arguments)
        return found

    return rows_of


def test_cheatsheet_takes_bytes_for_parameters_and_forgets_cp():
    """Erratum 4: compute = 6 model_bf16 tokens, where model_bf16 are bytes; GBS = mbs dp gas s with s of one rank.

    Its ZeRO-3 lacks 1/DP (`test_formulas_1_to_4.py`), its ZeRO-1 has an all-reduce and float32 weights.
    """
    count = count_parameters(LLAMA)
    in_layers = LLAMA.layers * (count.attention + count.dense_mlp)
    assert 3 * count_flops(LLAMA, 1).linear == 6 * in_layers
    assert states(LLAMA, torch.bfloat16)["parameters"] == 2 * count.total
    config = configure(6, "--cp 4 --dp 2 --micro-batch 2 --global-batch 12 --seq-len 64", 8)
    cheatsheet = config.micro_batch * config.dp * config.accumulation_steps * config.rank_seq_len
    assert (config.global_batch * config.seq_len, config.accumulation_steps) == (4 * cheatsheet, 3)
    ours = sum(each.bytes for each in zero.messages((100,), 1, 4, widths=(2, 4)) if each.group == "shard")
    assert (ours, 3 / 4 * 100 * (2 * 2 + 4)) == (450, 600)  # a reduce-scatter of float32 sums, a gather of bfloat16


def test_bars_of_8b_in_each_dimension(printed):
    """Erratum 6: TP 8 "with SP" shows (10 + 24/8) s h L and undivided inputs, CP 8 is divided by 64.

    34 s h L is 34·2¹⁰·2¹²·2⁵ = 4.25 GiB for 1,024 tokens, 2 s h L a quarter; states have 12 bytes per parameter.
    """
    rows, ways = printed(memory_8b, memory_8b.memory_8b, True), {way.name: way for way in memory_8b.ways()}
    kept = {
        "one GPU": 4.25,
        "DP 8, ZeRO-3": 4.25,
        "TP 8 with SP": 4.25 / 8,
        "PP 8": 4.25,
        "CP 8": 4.25 / 8,
        "EP 8": 4.25,
    }
    held = {"one GPU": "89.75", "DP 8, ZeRO-3": "11.22", "TP 8 with SP": "11.22", "PP 8": "15.62", "EP 8": "34.62"}
    held["CP 8"] = held["one GPU"]
    for (mode, factor), (name, gib) in itertools.product((("selective", 1), ("full", 2 / 34)), kept.items()):
        whole = [4.25 * factor * length / 1024 for length in memory_8b.LENGTHS]
        cells = rows[f"{mode}: {name}"]
        assert (cells[0], *cells[1:7:2]) == (held[name], *(f"{each * gib / 4.25:.3g}" for each in whole))
        if name in ("TP 8 with SP", "CP 8"):
            wrong = 1 / 64 if name == "CP 8" else 13 / 34 if mode == "selective" else 1
            assert ways[name].published[mode] == pytest.approx([wrong * each for each in whole], rel=0.005, abs=0.0007)
        else:
            assert cells[2:7:2] == ("same",) * 3
    parameters = {name: 2 * way.parameters / GIB for name, way in ways.items()}  # as the playbook prints them
    published = {"one GPU": 14.96, "DP 8, ZeRO-3": 1.87, "PP 8": 2.60, "EP 8": 5.77}
    assert {name: round(parameters[name], 2) for name in published} == published


def test_mistakes_of_the_memory_widget(printed):
    """Erratum 8: (what it says, what is right), for t = 8."""
    rows = [
        ("44.25", "9.25"),  # 34/8 + 5·32·1024/4096; (34 + 40)/8
        ("120.5", "15.1"),  # 2 (8192·(30522 + 256) + 80·(12·8192² + 13·8192) + 2·8192) bytes
        ("256", "32"),  # 2·1024·4096·32 bytes
        ("501", "63"),  # 4·1024·128256 bytes
        ("16", "20"),
        ("134", "176"),  # 8·4096²; 3·4096·14336
    ]
    assert list(printed(playbook, playbook.widget, True).values()) == rows


def test_profile_of_llama_1b(printed):
    """Erratum 11: its states are float32, and its peak is a transient of the loss, at the end of the forward."""
    rows = printed(playbook, playbook.llama_profile, True)
    for name in ("parameters", "gradients", "moments"):
        predicted, published = rows[name]
        assert predicted == published
    model, shape = PRESETS["llama3-1b"], (8, 1024)  # 46.1 GiB of activations, where 45.62 are published
    peak = predict_peak(model, *shape, torch.float32, "naive")
    assert rows["activations, 8 x 1024 tokens, naive"] == ("46.12", "45.62")
    assert peak.peak == peak.loss > max(peak.layers, peak.update)
    assert round(peak.idle / GIB, 2) == 13.81  # of the published 59.49, of which 45.62 are activations
    assert states(model, torch.bfloat16)["parameters"] < 0.51 * states(model, torch.float32)["parameters"]


@pytest.mark.parametrize(
    "name, shares, ratio", [("llama3-1b", (18, 43, 74, 91), 3.72), ("llama3-405b", (2, 7, 20, 48), 1.25)]
)
def test_claims(name, shares, ratio):
    """Activations "matter from 2 to 4 thousand tokens on", and full recomputation "has more effect on small models":
    by its own formulas, of one sequence of 1k to 8k tokens with float32 states."""
    shape, lengths = gpt.from_model(PRESETS[name]), (1024, 2048, 4096, 8192)
    held = sum(gpt.states(shape.parameters, mixed=False).values())
    none, full = ([gpt.text_activations(shape, 1, s, mode) for s in lengths] for mode in ("none", "full"))
    assert tuple(round(100 * each / (held + each)) for each in none) == shares
    assert round((held + none[2]) / (held + full[2]), 2) == ratio


def test_attention_core_of_8b():
    """Appendix A2's s/8h takes 16 h² for a layer; it has 13 h², so the core is 16/13 of that."""
    count, flops = count_parameters(LLAMA), count_flops(LLAMA, 8192)
    core = flops.attention_core / (2 * 8192 * LLAMA.layers * (count.attention + count.dense_mlp))
    assert 8192 / (8 * 4096) == 0.25 and round(core, 3) == 0.308


def test_changes_of_1f1b(printed, monkeypatch):
    """Erratum 12: from 8 to 16 stages the text loses 14 %, the figure 14.9. What we read off it is rounded to 100."""
    for name, changes in pipeline_cluster.PUBLISHED_CHANGES.items():
        speeds = pipeline_cluster.PUBLISHED_1F1B[name]
        for p, change in changes.items():
            assert 100 * (speeds[p] / speeds[p // 2] - 1) == pytest.approx(change, abs=1)
    assert pipeline_cluster.PUBLISHED_CHANGES["m = p - 1"][16] == -14.9
    shares = [pipeline.efficiency(pipeline.bubble_ratio(p, 32)) for p in (2, 4, 8, 16, 32)]
    assert [round(share, 3) for share in shares] == [0.970, 0.914, 0.821, 0.681, 0.508]
    rows = printed(pipeline_memory, pipeline_memory.balance, True)
    assert rows["one GPU"] == ("14.96", "14.96") and rows["pp 8, stage 0 of 4 layers"] == ("2.60", "2.60")


def test_bars_of_zero_tensor_and_expert_parallelism(printed):
    """8 B with DP 8, GiB of parameters, gradients and optimizer; 70 B under tp, whose bars are the GPT formulas."""
    count = count_parameters(LLAMA).total
    for stage, bar in zero_cluster.PUBLISHED.items():
        ours = [each / GIB for each in zero.held(count, stage, 8, zero_cluster.PLOTTED).values()]
        assert ours == pytest.approx(bar, rel=0.004)
    for name, (shown, formula, _) in printed(tensor_memory, tensor_memory.compare_70b).items():
        assert float(formula) == pytest.approx(float(shown), rel=0.004), name


def test_llama_405b():
    """A step of the published runs, by hand. A token takes 2 FLOPs for each weight that it is multiplied with."""
    token = 2 * 403_747_897_344 + 2 * 126 * 8192 * 16384
    few, _, long = cluster.RUNS
    computes = sum(cost.operations(cluster.LLAMA, few.layout).values())
    assert computes == pytest.approx(3 * token * 8192 * 64 * 32 / 8192)
    for run in cluster.RUNS:  # as published: FLOP/s over the peak
        assert run.tflops / 989 == pytest.approx(run.mfu, abs=0.006)
    sent = cluster.traffic(few.layout)
    stream, times = 2 * 8192 * 16384, 126 / 16 * 32  # layers of 32 micro-batches
    parameters = (405_853_388_800 - 2 * 128_256 * 16384 - 16384 - 126 * 2 * 16384) / 128 + 126 * 2 * 16384 / 16
    assert {name: size for name, (size, *_) in sent.items()} == pytest.approx(
        {"dp": 63 / 64 * parameters * 6, "pp": 2 * 32 * 8 * stream / 8, "tp": times * 10 * 7 / 8 * stream}, rel=1e-5
    )
    assert sent["tp"][1] == pytest.approx(times * 10 * 7 * (1e-5 + stream / 8 / 450e9), rel=1e-3)
    assert sent["pp"][1] == pytest.approx(2 * 32 * 8 * (1e-5 + stream / 8 / 50e9))
    assert sent["dp"][1] == pytest.approx(63 * (2e-5 + 6 * parameters / 64 / 50e9))
    keys = 2 * 131_072 * 8 * 128 // 8  # a K/V head each: 126 layers of micro-batches gather twice and scatter sums
    size, seconds, _ = cluster.traffic(long.layout)["cp"]
    assert size == 126 * 15 / 16 * keys * (2 * 2 + 4)
    assert seconds == pytest.approx(126 * 15 * (6e-5 + keys * 8 / 16 / 50e9))
    assert cost.bubble(few.layout) == 15 / (8 * 32 + 15)
