"""What the playbook publishes, beside what our formulas print of it: where they agree, and its errata, by number."""

import itertools
import math

import pytest
import torch

from common.counts import count_flops, count_parameters
from common.model_config import ModelConfig
from common.presets import PRESETS
from step01_single_gpu.experiments import playbook
from step01_single_gpu.memory_model import gpt
from step01_single_gpu.memory_model.gpt import GptShape
from step01_single_gpu.memory_model.peak import predict_peak
from step02_data_parallel.experiments import cluster as data_cluster
from step03_zero import cost as zero
from step03_zero.experiments import cluster as zero_cluster
from step04_tensor_parallel.experiments import memory as tensor_memory
from step05_pipeline.experiments import memory as pipeline_memory
from step08_5d import cost
from step08_5d.experiments import cluster, memory_8b
from tests.harness.observing import configure

LLAMA, GIB = PRESETS["llama3-8b"], 2**30
MODES = "none", "selective", "full"


@pytest.fixture
def printed(monkeypatch):
    """The rows of all tables that an experiment prints, by their first cell."""

    def rows_of(module, experiment, *arguments) -> dict[str, tuple]:
        found = {}
        monkeypatch.setattr(module, "print_table", lambda _, __, rows: found.update((r[0], r[1:]) for r in rows))
        experiment(*arguments)
        return found

    return rows_of


# ---- one GPU ---------------------------------------------------------------------------------------------------------


def test_a_layer_of_the_gpt_and_its_states():
    """The finer formulas of the widget: (attention, scores, MLP, norms) times s b h or a s² b; states in its tables."""
    shape, sbh, as2b = GptShape(vocab=0, hidden=64, layers=1, heads=4), 16 * 2 * 64, 4 * 16**2 * 2
    wide = {"attention": 21 * sbh, "scores": 9 * as2b, "mlp": 37 * sbh, "norms": 8 * sbh}
    assert gpt.layer_activations(shape, 2, 16, mixed=False) == wide
    for mode in MODES:
        widget = sum(gpt.layer_activations(shape, 2, 16, recompute=mode).values())
        assert widget == gpt.text_activations(shape, 2, 16, mode), mode
    mlps = [gpt.layer_activations(shape, 2, 16, mlp=kind)["mlp"] // sbh for kind in ("gelu", "relu", "swiglu")]
    assert mlps == [19, 11, 35]
    assert [sum(gpt.states(70, *kind).values()) // 70 for kind in ((False,), (True, False), (True,))] == [16, 16, 20]
    held = gpt.states(gpt.from_model(LLAMA).parameters, mixed=False)
    assert [round(size / GIB) for size in held.values()] == [26, 26, 52]


def test_selective_recomputation_of_gpt_3():
    """What it drops, and what it computes again. The playbook cites 2.7 % without a formula: the core once more, q k^T
    and p v of 4 b s^2 h over a layer's 72 b s h^2 + 12 b s^2 h, is a third of the s / 6 h of Korthikanti et al.
    """
    shape, s, h = GptShape(50257, 12288, 96, 96), 2048, 12288
    kept = [gpt.text_activations(shape, 1, s, mode) for mode in ("selective", "none")]
    assert round(1 - kept[0] / kept[1], 3) == 0.702
    assert 4 * s / (72 * h + 12 * s) == pytest.approx(0.009, abs=5e-5)
    assert s / (6 * h) == pytest.approx(0.0278, abs=5e-5)


LLAMA_3B = ModelConfig(128256, 3072, 28, 24, 8, 8192, True)
PLOTTED = {  # GiB of one sequence of 1, 2, 4, 8 and 16 thousand tokens; with 4 thousand in each mode
    "1B": (PRESETS["llama3-1b"], (), (44.3, 4.26, 0.258)),
    "3B": (LLAMA_3B, (), (63.7, 11.2, 0.668)),
    "8B": (LLAMA, (9.25, 28.5, 97.0, 354.0, 1348), (97.0, 17.0, 1.02)),
    "70B": (PRESETS["llama3-70b"], (46.3, 142.5, 485, 1770, 6740), (485, 85, 5.03)),
    "405B": (PRESETS["llama3-405b"], (145.7, 448.9, 1527.8, 5575.6, 21231), (1528, 268, 15.8)),
}


@pytest.mark.parametrize("name", PLOTTED)
def test_activations_of_the_plots(name):
    """The figure of the modes adds masks of the embedding's dropout, s b h."""
    model, lengths, modes = PLOTTED[name]
    shape = gpt.from_model(model)
    found = [gpt.text_activations(shape, 1, 1024 * 2**i) / GIB for i in range(len(lengths))]
    assert found == pytest.approx(lengths, rel=0.002)
    found = [(gpt.text_activations(shape, 1, 4096, mode) + 4096 * model.hidden) / GIB for mode in MODES]
    assert found == pytest.approx(modes, rel=0.005)


def test_claims_about_activations():
    """When they count (half of the states of 16 bytes per parameter), and whom recomputation helps, are sentences of
    the planner's page: "from 2-4k tokens on" holds up to 8B, and of activations alone every model saves the same.
    """
    counts, less, less_in_all = [], [], []
    for model, *_ in PLOTTED.values():
        shape = gpt.from_model(model)
        states = sum(gpt.states(shape.parameters, True, False).values())
        lengths = (length for length in (1, 2, 4, 8, 16) if gpt.text_activations(shape, 1, 1024 * length) > states / 2)
        counts.append(next(lengths))
        kept, selective = (gpt.text_activations(shape, 1, 4096, mode) for mode in MODES[:2])
        less.append(round(kept / selective, 1))
        less_in_all.append(round((states + kept) / (states + selective), 1))
    assert (counts, less, less_in_all) == ([2, 4, 4, 8, 8], [10.4, *[5.7] * 4], [3.0, 1.8, 1.7, 1.4, 1.2])
    # 70B on 16 tensor ranks with sequence parallelism: states of 12 bytes, and what a rank keeps of one sequence
    large = PRESETS["llama3-70b"]
    states = 12 * count_parameters(large).total
    held = {
        (mode, length): (states + gpt.text_activations(gpt.from_model(large), 1, 1024 * length, mode)) / 16 / GIB
        for mode, length in itertools.product(MODES, (16, 32, 128))
    }
    assert held["selective", 16] < 80 < held["selective", 32] and 59 < held["full", 128] < 60


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


def test_timeline_of_predict_memory(printed):
    """2, 10 and 18 bytes for each of 12,746 MiB / 2 parameters: its other numbers follow, to the MiB."""
    rows = printed(playbook, playbook.predict_memory, True)
    assert [cells[0] for cells in rows.values()] == ["2", "10", "10 + activations", "18", "18 + activations", "18"]
    assert [cells[1] for cells in rows.values()] == [cells[2] for cells in rows.values()]


def test_units_and_scales(printed):
    """Erratum 7, 140 GB = 130.4 GiB; erratum 3, the scores' share is s/8h with 16 h² parameters per layer: s << h."""
    for h, heads, seq in ((64, 4, 32), (256, 8, 1000)):
        model = ModelConfig(96, h, 3, heads, heads, 4 * h, False)
        count, flops = count_parameters(model), count_flops(model, seq)
        assert count.attention + count.dense_mlp == 16 * h**2
        assert flops.attention_core * 8 * h == flops.linear * seq
    found = [counted for _, counted in printed(playbook, playbook.scales, True).values()]
    assert found == ["130.4", "16.0", "0.25", "13.0", "0.3077"]  # 13 = 4 - 1.5 + 3·3.5; 16/13 of 0.25


def test_profile_of_llama_1b(printed):
    """Erratum 11: its states are float32, and its peak is a transient of the loss, at the end of the forward."""
    rows = printed(playbook, playbook.llama_profile, True)
    for name in ("parameters", "gradients", "moments"):
        predicted, published = rows[name]
        assert predicted == published
    peak = predict_peak(PRESETS["llama3-1b"], 8, 1024, torch.float32, "naive")
    assert rows["activations, 8 x 1024 tokens, naive"] == ("46.12", "45.62")
    assert peak.peak == peak.loss > max(peak.layers, peak.update)


# ---- several ---------------------------------------------------------------------------------------------------------


def test_cheatsheet_takes_bytes_for_parameters_and_forgets_cp():
    """Erratum 4: compute = 6 model_bf16 tokens, where model_bf16 are bytes; GBS = mbs dp gas s with s of one rank.

    Its ZeRO-3 lacks 1/DP (`test_formulas.py`), its ZeRO-1 has an all-reduce and float32 weights.
    """
    count = count_parameters(LLAMA)
    in_layers = LLAMA.layers * (count.attention + count.dense_mlp)
    assert 3 * count_flops(LLAMA, 1).linear == 6 * in_layers
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
    held = {"one GPU": "89.75", "DP 8, ZeRO-3": "11.22", "TP 8 with SP": "11.22", "PP 8": "15.62", "EP 8": "34.62"}
    held["CP 8"] = held["one GPU"]
    for (mode, factor), name in itertools.product((("selective", 1), ("full", 2 / 34)), held):
        divided = name in ("TP 8 with SP", "CP 8")
        whole = [4.25 * factor * length / 1024 for length in memory_8b.LENGTHS]
        cells = rows[f"{mode}: {name}"]
        assert (cells[0], *cells[1:7:2]) == (held[name], *(f"{each / (8 if divided else 1):.3g}" for each in whole))
        if divided:
            wrong = 1 / 64 if name == "CP 8" else 13 / 34 if mode == "selective" else 1
            assert ways[name].published[mode] == pytest.approx([wrong * each for each in whole], rel=0.005, abs=0.0007)
        else:
            assert cells[2:7:2] == ("same",) * 3


def test_limits_of_zero():
    """Of 16 bytes 4 times, 8 times, without end ("ZeRO", section 5.4); ours are 18, of which 6 and 2 stay."""
    limits = {stage: (zero.saving(stage, math.inf), zero.saving(stage, math.inf, (2, 4, 12))) for stage in (0, 1, 2, 3)}
    assert limits == {0: (1, 1), 1: (4, 3), 2: (8, 9), 3: (math.inf, math.inf)}
    assert [zero.saving(stage, 64) for stage in (1, 2, 3)] == pytest.approx([16 / 4.1875, 16 / 2.21875, 64])


def test_bars_of_zero_tensor_and_pipeline_parallelism(printed):
    """8 B with DP 8, GiB of parameters, gradients and optimizer; 70 B under tp, whose bars are the GPT formulas."""
    count = count_parameters(LLAMA).total
    for stage, bar in zero_cluster.PUBLISHED.items():
        ours = [each / GIB for each in zero.held(count, stage, 8, zero_cluster.PLOTTED).values()]
        assert ours == pytest.approx(bar, rel=0.004)
    for name, (shown, formula, _) in printed(tensor_memory, tensor_memory.compare_70b).items():
        assert float(formula) == pytest.approx(float(shown), rel=0.004), name
    rows = printed(pipeline_memory, pipeline_memory.balance, True)
    assert rows["one GPU"] == ("14.96", "14.96") and rows["pp 8, stage 0 of 4 layers"] == ("2.60", "2.60")
    assert [100 * drop for drop in data_cluster.drops()] == pytest.approx([-6.3, -6.0, -12.0, -15.0, -40.6], abs=0.05)


def test_llama_405b():
    """A step of the published runs, by hand. A token takes 2 FLOPs for each weight that it is multiplied with."""
    token = 2 * 403_747_897_344 + 2 * 126 * 8192 * 16384
    few = cluster.RUNS[0]
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
    assert cost.bubble(few.layout) == 15 / (8 * 32 + 15)
