"""Step 1: memory is predicted to the byte, and whether a run can fit at all."""

import itertools
import math
import tempfile
from dataclasses import replace
from unittest import mock

import pytest
import torch

from common.config import TrainConfig
from common.counts import count_parameters
from common.errors import UsageError
from common.launching.command_line import parse
from common.measure.saved_tensors import SavedTensors
from common.model import cross_entropy_sum
from common.model_config import LatentShape, ModelConfig
from common.presets import PRESETS
from common.start import environment
from step01_single_gpu.cost import saved_activations, states, total_bytes
from step01_single_gpu.experiments.memory import held_after_backward
from step01_single_gpu.experiments.tools import OneProcess, train_in
from step01_single_gpu.memory_model import __main__ as calculator
from step01_single_gpu.memory_model import capacity
from step01_single_gpu.memory_model.capacity import bytes_needed
from step01_single_gpu.memory_model.peak import predict_peak
from step01_single_gpu.running.memory_meter import MemoryMeter
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import run_ranks

MODES = ("none", "selective", "full")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("attention", ["naive", "fused"])
def test_saved_activations_are_predicted_to_the_byte(attention, dtype):
    models = (2, False), (6, True), (1, True), (3, False, 16), (3, False, 4)  # the last two: a head width of their own
    models += (6, False, None, LatentShape(20, 16, 6, 4, 8)), (6, True, None, LatentShape(0, 16, 6, 4, 10))
    for (kv_heads, tie, *head_dim), mode in itertools.product(models, MODES):
        config = TrainConfig(attention=attention, recompute=mode, dtype=dtype)
        config.model_config = ModelConfig(96, 48, 2, 6, kv_heads, 80, tie, head_dim=(head_dim or [None])[0])
        config.model_config = replace(config.model_config, latent=(*head_dim, None, None)[1])
        model = OneProcess(config).model
        for batch, seq in ((1, 2), (1, 24), (3, 7)):
            tokens, targets = (torch.randint(config.model_config.vocab, (batch, seq)) for _ in range(2))
            with SavedTensors(model) as found:
                loss = cross_entropy_sum(model(tokens), targets) / targets.numel()
            assert loss.requires_grad
            predicted = saved_activations(config.model_config, batch, seq, config.torch_dtype, attention, mode)
            sizes = sorted(each.untyped_storage().nbytes() for each in found.tensors)
            assert sizes == sorted(saved.bytes for saved in predicted), (kv_heads, tie, head_dim, mode, batch, seq)


# ---- when a step needs the most --------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["naive", "fused"])
@pytest.mark.parametrize("mode", MODES)
def test_peak_of_a_step_is_predicted(attention, mode):
    shape = {"hidden": 128, "layers": 4, "ffn": 384, "seq_len": 128, "attention": attention, "recompute": mode}
    cases = ("float32", 1, 2048), ("float32", 1, 128), ("float32", 2, 128), ("bfloat16", 1, 128)
    for dtype, accumulation, vocab in cases:  # loss, layers and update: each is the peak in some of them
        config = TrainConfig(**shape, dtype=dtype, vocab=vocab, micro_batch=2, global_batch=2 * accumulation)
        run = OneProcess(config)
        for first in (True, False):
            with MemoryMeter("cpu").measure(run.state()) as found:
                run.step()
            case = (config.model_config, 2, 128, config.torch_dtype, attention, mode, "adamw", accumulation, first)
            within = 0.015 if dtype == "float32" else 0.03
            assert predict_peak(*case).peak == pytest.approx(found.peak_bytes, rel=within), (dtype, accumulation, first)


@pytest.mark.parametrize("dtype, per_parameter", [("float32", 16), ("bfloat16", 18), ("float16", 18), ("float64", 32)])
def test_what_is_held_when_the_backward_ends(dtype, per_parameter):
    """The step's own tensors, by kind; of autograd's gradients there never is more than one tensor."""
    config = TrainConfig(hidden=64, layers=2, seq_len=16, dtype=dtype, micro_batch=1, global_batch=2)
    count, found = count_parameters(config.model_config).total, held_after_backward(OneProcess(config))
    expected = states(config.model_config, config.torch_dtype)
    expected |= {"gradients of autograd": 0, "their sums": expected.pop("gradients")}
    largest = 384 * 64 * config.torch_dtype.itemsize  # the embedding, and each matrix of an MLP
    assert found == expected | {"gradients of autograd, at most": largest}
    assert sum(expected.values()) == pytest.approx(per_parameter * count, rel=1e-3)  # counters of AdamW's steps


def peaks_of_training(flags: dict) -> list[int]:
    with tempfile.TemporaryDirectory() as folder:
        return [line["peak_memory_bytes"] for line in train_in(folder, **flags, measure_memory=True)]


@pytest.mark.parametrize("dtype, mode", [("float32", "none"), ("bfloat16", "full")])
def test_train_peaks_where_the_calculator_says(dtype, mode):
    """train.py as it is: a name in its loop that kept gradients or a graph alive would show."""
    flags = {"data": "synthetic", "steps": 3, "seq_len": 128, "vocab": 1024, "dtype": dtype, "recompute": mode}
    config = TrainConfig(**flags)
    shape = (config.model_config, config.micro_batch, 128, config.torch_dtype, "fused", mode, "adamw", 4)
    [peaks] = run_ranks(1, peaks_of_training, flags)  # a process of its own: nothing else is alive there
    predicted = [predict_peak(*shape, first_step=first).peak for first in (True, False, False)]
    assert peaks == pytest.approx(predicted, rel=0.001)


# ---- whether it fits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, ranks, needed",  # 568: embedding and head 256, norms 24, attention 256, router 32; and 1152 of experts
    [
        ("--optimizer sgd --dtype bfloat16", 1, 10 * (568 + 1152)),
        ("--dtype bfloat16 --moments bfloat16", 1, (2 + 4 + 4 + 2 + 2) * (568 + 1152)),
        ("--tp 2 --dp 2 --ep 4", 4, 16 * (2 * 568 + 1152)),
        ("--pp 2 --dp 2 --layers 2", 4, 16 * 2 * (568 + 1152 + 16 + 256 + 32 + 1152)),
        ("--dp 4 --ep 2 --zero 2 --dtype bfloat16", 4, 2 * (4 * 568 + 2 * 1152) + 16 * (568 + 1152)),
        ("--dp 4 --ep 2 --zero 3 --zero-replicas 2", 4, 16 * 2 * (568 + 1152)),
    ],
)
def test_what_a_run_is_sure_to_need(flags, ranks, needed):
    """With experts; without, step 3's accounting compares it with what ranks hold."""
    shape = "--layers 1 --hidden 8 --heads 2 --kv-heads 2 --ffn 12 --vocab 16 --experts 4 --global-batch 8 --seq-len 4"
    assert bytes_needed(configure(8, f"{shape} {flags}", ranks)) == needed


def test_the_memory_of_a_machine(tmp_path, monkeypatch):
    """What Linux can give, or a smaller limit of a control group around this process."""
    monkeypatch.setattr(capacity, "SYSTEM", tmp_path)
    assert capacity.free_memory(torch.device("cpu"))[1] == math.inf, "not Linux: nothing is known, nothing is refused"
    meminfo = {"proc/meminfo": "MemTotal: 90 kB\nMemAvailable: 40 kB\nSwapFree: 2 kB\n"}
    boot, groups, none = "proc/sys/kernel/random/boot_id", "proc/self/cgroup", "sys/fs/cgroup/job/memory.max"
    version_1 = "".join(f"{number}:controller-{number}:/{number * 'job'}\n" for number in range(1, 20))
    for files, expected in (
        (meminfo, 42 * 1024),  # a sandbox shows no more
        ({boot: "abc\n", groups: "0::/job/1\n", none: "max\n", "sys/fs/cgroup/memory.max": "50000\n"}, 42 * 1024),
        ({"sys/fs/cgroup/memory.max": "30000\n"}, 30000),
        ({groups: version_1, "sys/fs/cgroup/memory.max": "50000\n"}, 42 * 1024),
        ({groups: f"{version_1}0::/job/2\n", "sys/fs/cgroup/job/2/memory.max": "20000\n"}, 20000),
    ):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        place, free = capacity.free_memory(torch.device("cpu"))
        assert free == expected and ("abc" in place) == (files != meminfo) and ("memory.max" in place) == (free < 42000)


def ranks_are_refused(free: list[tuple[str, int]]) -> list[str | None]:
    """What `check_memory` says when ranks see this much memory, and one byte less."""
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
    assert found[0][1].startswith("--model debug with ")


# ---- the calculator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_calculator(mode, capsys):
    """It adds up what our model and the playbook's GPT keep, each proved elsewhere. Here 34 s b h is 34 MiB."""
    shape = "--layers 1 --hidden 1024 --heads 4 --kv-heads 4 --ffn 4096 --seq-len 512 --attention naive --micro-batch 2"
    flags = f"{shape} --dtype bfloat16 --recompute {mode}".split()
    assert calculator.main(flags) == 0
    config = parse(1, flags)
    ours, theirs = calculator.breakdown(config)
    saved = saved_activations(config.model_config, 2, 512, torch.bfloat16, "naive", mode)
    assert ours.total() == sum(states(config.model_config, torch.bfloat16).values()) + total_bytes(saved)
    layer = {name: theirs[name] / 2**20 for name in ("attention", "scores", "mlp", "norms", "layer inputs")}
    kept = {"none": (11, 10, 19, 4, 0), "selective": (11, 0, 19, 4, 0), "full": (0, 0, 0, 0, 2)}[mode]  # 5 a s/h is 10
    assert tuple(layer.values()) == kept
    for wrong in ("--model mixtral-8x7b", "--heads 7", "--what", "--seq-len 0", "--micro-batch 0"):
        assert calculator.main(wrong.split()) == 2
        assert capsys.readouterr().err.count("error: ") == 1
