"""Step 1: memory is predicted to the byte, and the playbook's formulas hold for the model that they describe."""

import contextlib
import itertools
import math
import tempfile
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from common.config import TrainConfig
from common.counts import count_parameters
from common.errors import UsageError
from common.launching.command_line import parse
from common.measure.saved_tensors import SavedTensors
from common.measure.storages import live_bytes
from common.model import cross_entropy_sum
from common.model_config import ModelConfig
from common.presets import PRESETS
from common.start import environment
from step01_single_gpu import cost as memory
from step01_single_gpu.cost import saved_activations, states, total_bytes
from step01_single_gpu.experiments import memory_timeline as timeline
from step01_single_gpu.experiments.tools import Run, train_in
from step01_single_gpu.memory_meter import MemoryMeter
from step01_single_gpu.memory_model import __main__ as calculator
from step01_single_gpu.memory_model import capacity
from step01_single_gpu.memory_model import gpt as gpt_memory
from step01_single_gpu.memory_model.capacity import bytes_needed
from step01_single_gpu.memory_model.gpt import GptShape
from step01_single_gpu.memory_model.peak import predict_peak
from step01_single_gpu.recompute import recomputed
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import run_ranks
from tests.mechanisms.step01.gpt_block import GptBlock

MODES = ("none", "selective", "full")
GIB = 2**30


def tiny(kv_heads: int = 2, tie: bool = False, head_dim: int | None = None) -> ModelConfig:
    return ModelConfig(96, 48, 2, 6, kv_heads, 80, tie, head_dim=head_dim)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("attention", ["naive", "fused"])
def test_saved_activations_are_predicted_to_the_byte(attention, dtype):
    models = (2, False), (6, True), (1, True), (3, False, 16), (3, False, 4)  # the last two: a head width of their own
    for shape, mode in itertools.product(models, MODES):
        config = TrainConfig(attention=attention, recompute=mode, dtype=dtype)
        config.model_config = tiny(*shape)  # no flag sets head_dim
        model = Run(config).model
        for batch, seq in ((1, 2), (1, 24), (3, 7), (2, 24)):
            tokens, targets = (torch.randint(config.model_config.vocab, (batch, seq)) for _ in range(2))
            with SavedTensors(model) as found:
                loss = cross_entropy_sum(model(tokens), targets) / targets.numel()
            assert loss.requires_grad
            predicted = saved_activations(config.model_config, batch, seq, config.torch_dtype, attention, mode)
            sizes = sorted(saved.bytes for saved in predicted)
            case = (shape, mode, batch, seq)
            assert sizes == sorted(each.untyped_storage().nbytes() for each in found.tensors), case
            assert total_bytes(predicted) == found.bytes, case


@pytest.mark.parametrize("dtype, each", [("float32", 16), ("float64", 32), ("bfloat16", 18), ("float16", 18)])
def test_states_are_the_live_tensors(dtype, each):
    run = Run(TrainConfig(dtype=dtype, seq_len=8, micro_batch=1, global_batch=1, layers=1))
    run.step()
    held = []

    @contextlib.contextmanager
    def phase(name: str, **_):
        if name == "optimizer":  # all gradients of the step are there
            held.append(live_bytes([*run.state(), *run.gradient_sums.sums.values()]) - live_bytes([run.batches.tokens]))
        yield

    total = run.gradients(tracer=SimpleNamespace(phase=phase))
    (held,) = held
    model = run.config.model_config
    assert held == sum(states(model, run.config.torch_dtype).values())
    assert abs(held / count_parameters(model).total - each) < 0.01
    assert len(run.parameters) == memory.tensor_count(model)
    assert all(parameter.grad is None for parameter in run.parameters)  # no narrow gradient stays
    run.update(total)  # and gone between steps
    assert total == [] and not run.gradient_sums.sums
    assert all(master.grad is None for master in run.optimizer.masters)


@pytest.mark.parametrize("attention", ["naive", "fused"])
@pytest.mark.parametrize("mode", MODES)
def test_peak_of_a_step_is_predicted(attention, mode):
    shape = {"hidden": 128, "layers": 4, "ffn": 384, "seq_len": 128, "attention": attention, "recompute": mode}
    for dtype, accumulation, vocab in (("float32", 1, 2048), ("float32", 2, 128), ("bfloat16", 1, 128)):
        config = TrainConfig(**shape, dtype=dtype, vocab=vocab, micro_batch=2, global_batch=2 * accumulation)
        run = Run(config)
        for first in (True, False):
            with MemoryMeter("cpu").measure(run.state()) as found:
                run.step()
            case = (config.model_config, 2, 128, config.torch_dtype, attention, mode, "adamw", accumulation, first)
            ratio = predict_peak(*case).peak / found.peak_bytes
            assert abs(ratio - 1) < (0.005 if vocab == 2048 else 0.06), (dtype, accumulation, first, ratio)


def test_timeline_knows_what_is_what():
    config = TrainConfig(layers=1, vocab=512, seq_len=32, micro_batch=2, global_batch=2)
    result = timeline.record(Run(config), 2)
    sizes = {name: [each[i] for _, each in result.points] for i, name in enumerate(timeline.CATEGORIES)}
    expected = states(config.model_config, torch.float32)
    saved = saved_activations(config.model_config, 2, 32, torch.float32)
    expected["activations"] = total_bytes(each for each in saved if each.name not in ("tokens", "targets"))
    for name in ("parameters", "gradients", "moments", "activations"):
        assert max(sizes[name]) == expected[name], name
        assert sizes[name][-1] == (expected[name] if name in ("parameters", "moments") else 0), name
    first_update = next(start for name, start, _ in result.phases if name == "optimizer") - timeline.SLACK
    early = [point for point, (seconds, _) in zip(sizes["moments"], result.points) if seconds < first_update]
    assert max(early) == 0


def peaks_of_training(flags: dict) -> list[int]:
    with tempfile.TemporaryDirectory() as folder:
        return [line["peak_memory_bytes"] for line in train_in(folder, **flags, measure_memory=True)]


@pytest.mark.parametrize("dtype, mode", [("float32", "none"), ("bfloat16", "full")])
def test_train_peaks_where_the_calculator_says(dtype, mode):
    """train.py as it is: a name in its loop that kept gradients or a graph alive would show."""
    flags = {"data": "synthetic", "steps": 3, "seq_len": 128, "vocab": 1024, "dtype": dtype, "recompute": mode}
    config = TrainConfig(**flags)
    [peaks] = run_ranks(1, peaks_of_training, flags)  # a process of its own: nothing else is alive there
    shape = (config.model_config, config.micro_batch, 128, config.torch_dtype, "fused", mode, "adamw", 4)
    for peak, first in zip(peaks, (True, False, False), strict=True):
        assert abs(predict_peak(*shape, first_step=first).peak / peak - 1) < 0.001


# ---- whether it fits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, ranks, needed",  # 568: embedding and head 256, norms 24, attention 256, router 32; and 1152 of experts
    [
        ("", 1, 16 * (568 + 1152)),
        ("--dtype bfloat16", 1, 18 * (568 + 1152)),
        ("--optimizer sgd", 1, 8 * (568 + 1152)),
        ("--dp 4 --ep 2", 4, 16 * (4 * 568 + 2 * 1152)),
        ("--tp 2 --dp 2 --ep 4", 4, 16 * (2 * 568 + 1152)),
        ("--pp 2 --dp 2 --layers 2", 4, 16 * 2 * (568 + 1152 + 16 + 256 + 32 + 1152)),
        ("--dp 4 --ep 2 --zero 1", 4, 8 * (4 * 568 + 2 * 1152) + 8 * (568 + 1152)),
        ("--dp 4 --ep 2 --zero 2 --dtype bfloat16", 4, 2 * (4 * 568 + 2 * 1152) + 16 * (568 + 1152)),
        ("--dp 4 --ep 2 --zero 3 --zero-replicas 2", 4, 16 * 2 * (568 + 1152)),
    ],
)
def test_what_a_run_is_sure_to_need(flags, ranks, needed):
    shape = "--layers 1 --hidden 8 --heads 2 --kv-heads 2 --ffn 12 --vocab 16 --experts 4 --global-batch 8 --seq-len 4"
    assert bytes_needed(configure(7, f"{shape} {flags}", ranks)) == needed


def test_the_memory_of_a_machine(tmp_path, monkeypatch):
    """What Linux can give, or a smaller limit of a control group around this process."""
    monkeypatch.setattr(capacity, "SYSTEM", tmp_path)
    assert capacity.free_memory(torch.device("cpu"))[1] == math.inf, "not Linux: nothing is known, nothing is refused"
    files = {"proc/meminfo": "MemTotal: 90 kB\nMemAvailable: 40 kB\nSwapFree: 2 kB\n"}
    files |= {"proc/self/cgroup": "0::/job/1\n", "proc/sys/kernel/random/boot_id": "abc\n"}
    files |= {"sys/fs/cgroup/job/memory.max": "max\n"}
    for limit, expected in (("50000\n", 42 * 1024), ("30000\n", 30000)):
        for name, text in (files | {"sys/fs/cgroup/memory.max": limit}).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        place, free = capacity.free_memory(torch.device("cpu"))
        assert free == expected and "abc" in place and ("memory.max" in place) == (free == 30000)


def ranks_are_refused(free: list[tuple[str, int]]) -> list[str | None]:
    """What `check_memory` says when ranks see this much memory."""
    config, lines, (place, here) = configure(3, "--zero 1 --global-batch 6"), [], free[environment().rank]
    for offset in (0, -1):
        with mock.patch.object(capacity, "free_memory", lambda _, offset=offset: (place, here + offset)):
            try:
                lines.append(capacity.check_memory(config, mesh_of(config)))
            except UsageError as error:
                lines.append(str(error))
    return lines


def test_ranks_of_one_machine_share_its_memory():
    """Three ranks on two machines: 8 bytes per parameter on each, and 8 that stage 1 divides among them."""
    needed = 32 * count_parameters(PRESETS["debug"]).total
    free = [("one", needed - 5000), ("one", needed - 5001), ("other", 5000)]
    found = run_ranks(3, ranks_are_refused, free)
    assert found == found[:1] * 3 and found[0][0] is None
    assert found[0][1].startswith("--model debug with ") and "at least 0.0 GB on all 3 ranks" in found[0][1]


# ---- the playbook's own form ----------------------------------------------------------------------------------


def test_layer_formula_and_its_parts():
    shape = GptShape(vocab=0, hidden=64, layers=1, heads=4)
    sbh, as2b = 16 * 2 * 64, 4 * 16**2 * 2
    for mixed, (attention, scores, mlp, norms) in ((True, (11, 5, 19, 4)), (False, (21, 9, 37, 8))):
        parts = gpt_memory.layer_activations(shape, 2, 16, mixed=mixed)
        each = {"attention": attention * sbh, "scores": scores * as2b, "mlp": mlp * sbh, "norms": norms * sbh}
        assert parts == each
    for mode in MODES:
        widget = sum(gpt_memory.layer_activations(shape, 2, 16, recompute=mode).values())
        assert widget == gpt_memory.text_activations(shape, 2, 16, mode), mode
    mlp = {kind: gpt_memory.layer_activations(shape, 2, 16, mlp=kind)["mlp"] // sbh for kind in gpt_memory.MLP_KINDS}
    assert mlp == {"gelu": 19, "relu": 11, "swiglu": 35}


def kept_by(block: GptBlock, function, x: torch.Tensor) -> int:
    with SavedTensors(block) as saved:
        result = function(x)
    assert result is not None
    return saved.bytes


@pytest.mark.parametrize("mode", MODES)
def test_a_built_gpt_layer_keeps_what_the_formula_says(mode):
    """34 s b h + 5 a s² b; selective recomputation 34 s b h, full 2 s b h. A tenth of that is a dropout's mask."""
    for hidden, heads, batch, seq in ((64, 4, 2, 64), (128, 2, 1, 96)):
        block = GptBlock(hidden, heads).to(torch.bfloat16)
        x = torch.randn(batch, seq, hidden, dtype=torch.bfloat16, requires_grad=True)
        if mode == "selective":
            block.attention.core = recomputed(block.attention.core)
        kept = kept_by(block, recomputed(block.forward) if mode == "full" else block, x)
        formula = gpt_memory.text_activations(GptShape(0, hidden, 1, heads), batch, seq, mode)
        assert abs(kept / formula - 1) < 0.01
        if mode == "none":
            parts = gpt_memory.layer_activations(GptShape(0, hidden, 1, heads), batch, seq)
            parts["attention"] += parts.pop("scores")
            for name, function in block.parts().items():
                assert abs(kept_by(block, function, x) / parts[name] - 1) < 0.07, name  # statistics of the norms


@pytest.mark.parametrize(
    "name, seq, mode, gib",
    [
        *(("llama3-8b", 1024 * 2**i, "none", size) for i, size in enumerate((9.25, 28.5, 97.0, 354.0, 1348))),
        *(("llama3-70b", 1024 * 2**i, "none", size) for i, size in enumerate((46.3, 142.5, 485, 1770, 6740))),
        *(("llama3-405b", 1024 * 2**i, "none", size) for i, size in enumerate((145.7, 448.9, 1527.8, 5575.6, 21231))),
        *(("llama3-1b", 4096, mode, size) for mode, size in zip(MODES, (44.3, 4.26, 0.258))),
        *(("llama3-8b", 4096, mode, size) for mode, size in zip(MODES, (97.0, 17.0, 1.02))),
        *(("llama3-70b", 4096, mode, size) for mode, size in zip(MODES, (485, 85, 5.03))),
        *(("llama3-405b", 4096, mode, size) for mode, size in zip(MODES, (1528, 268, 15.8))),
    ],
)
def test_activations_of_the_playbooks_plots(name, seq, mode, gib):
    size = gpt_memory.text_activations(gpt_memory.from_model(PRESETS[name]), 1, seq, mode) / GIB
    assert abs(size / gib - 1) < (0.002 if mode == "none" else 0.04)  # as read off the plots


def test_states_of_the_playbooks_tables():
    parameters = gpt_memory.from_model(PRESETS["llama3-8b"]).parameters
    held = gpt_memory.states(parameters, mixed=False)
    assert [round(size / GIB) for size in held.values()] == [26, 26, 52]
    for billions, plain, wide in ((1, 16, 20), (7, 112, 140), (70, 1120, 1400), (405, 6480, 8100)):
        count = billions * 10**9
        assert sum(gpt_memory.states(count, True, False).values()) == plain * 10**9
        assert sum(gpt_memory.states(count, False).values()) == plain * 10**9
        assert sum(gpt_memory.states(count).values()) == wide * 10**9


def test_selective_recomputation_of_gpt3():
    gpt3 = GptShape(50257, 12288, 96, 96)
    assert round(gpt_memory.selective_saving(gpt3, 2048), 3) == 0.702
    overhead = gpt_memory.selective_overhead(gpt3, 2048)
    assert round(overhead["core"], 4) == 0.009 and round(overhead["paper"], 4) == 0.0278


def test_calculator(capsys):
    assert calculator.main("--model llama3-8b --seq-len 4096 --micro-batch 1 --dtype bfloat16".split()) == 0
    shown = capsys.readouterr().out
    assert "8,030,261,248" in shown and "18.00" in shown and "20.00" in shown
    for size in ("3", "12"):  # neither divides the default global batch
        assert calculator.main(["--micro-batch", size]) == 0
    for wrong in ("--model mixtral-8x7b", "--heads 7", "--what", "--seq-len 0", "--micro-batch 0"):
        assert calculator.main(wrong.split()) == 2
        assert capsys.readouterr().err.count("error: ") == 1


# 512 tokens, and all widths 1024: the residual stream has 1 MiB in bfloat16, and so have a layer's scores of one byte
ROUND = "--layers 2 --hidden 1024 --heads 4 --kv-heads 4 --ffn 1024 --vocab 1024 --seq-len 512 --attention naive"
# MiB, of two layers. Of our model: q, k, v, their input and o_proj's; 4 + 2 bytes a score and a mask for all heads;
# five of the MLP; two norms of 4 + 2 bytes a number. Of the GPT: 11, 5 a s/h = 10, 19 and 4 bytes
CALCULATED = {
    "none": {"attention": (10, 11), "scores": (12.5, 10), "mlp": (10, 19), "norms": (12.01, 4)},
    "selective": {"attention": (10, 11), "mlp": (10, 19), "norms": (12.01, 4)},
    "full": {"layer inputs": (2, 2)},
}


@pytest.mark.parametrize("mode", MODES)
def test_calculator_takes_recomputation_into_account(mode, capsys):
    """Every row of activations, in MiB; the peak is that of `predict_peak`."""
    flags = f"{ROUND} --micro-batch 1 --global-batch 4 --dtype bfloat16 --recompute {mode}".split()
    assert calculator.main(flags) == 0
    shown, config = capsys.readouterr().out, parse(1, flags)
    peak = predict_peak(config.model_config, 1, 512, torch.bfloat16, "naive", mode, "adamw", 4).peak
    assert f"peak of a step in this project: {peak / 2**20:.2f} MiB" in shown
    lines = [line.rsplit(maxsplit=4) for line in shown.splitlines() if line.count(" MiB") == 2]
    found = {name.strip(): (float(ours), float(theirs)) for name, ours, _, theirs, _ in lines}
    ends = {"embedding": (1.0, 0.5), "head": (4.0, 2.0), "log-probabilities": (2.0, 2.0)}
    rows = {name: found[name] for name in calculator.ACTIVATIONS if name in found}
    ours, theirs = found["parameters"]  # narrow gradients are dropped at once, in the GPT they stay beside their sums
    assert found["float32 gradient sums"] == pytest.approx((2 * ours, 2 * theirs), abs=0.02)
    assert found["gradients"] == (0, theirs)
    assert rows.keys() == (CALCULATED[mode] | ends).keys()
    for name, sizes in (CALCULATED[mode] | ends).items():
        assert rows[name] == pytest.approx(sizes, abs=0.011), name
