"""The run record: what a run leaves on disk and shows, how it is continued, and how much of the hardware it used."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from common import collectives
from common.config import TrainConfig
from common.costs.hardware import vendor_tflops
from common.counts import count_flops
from common.errors import UsageError
from common.process_groups import mesh_of
from common.record.metrics import read_metrics
from common.start import environment
from step01_single_gpu.recording import run_record, utilisation
from step01_single_gpu.recording.run_record import RunRecord
from step01_single_gpu.recording.utilisation import peak_flops
from tests.harness.ranks import run_ranks

KEYS = {"step", "loss", "aux_loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "mfu", "hfu"}
KEYS |= {"peak_memory_bytes", "comm_bytes"}
TOKENS = 512  # per step
CORPUS = SimpleNamespace(name="none", sha256="abc", tokens=range(1000))
BATCHES = SimpleNamespace(corpus=CORPUS, target_tokens=TOKENS)


def record_of(run_dir, first_step=0, device="cpu", **flags) -> RunRecord:
    """This rank's record of a run of ten steps."""
    config = TrainConfig(run_dir=run_dir and str(run_dir), **({"steps": 10, "peak_tflops": 1.0} | flags))
    config.resolve_and_check(environment().world_size)
    mesh = mesh_of(config, torch.device(device))
    return RunRecord(config, mesh, BATCHES, first_step)


def write_steps(record, steps, **numbers):
    for step in steps:
        with record.step(step) as measured:
            measured.update({"loss": 1.0, "grad_norm": 1 / 3, "lr": 1e-3} | numbers)
    record.close()


def test_one_object_a_step_with_every_key_at_full_precision(tmp_path):
    losses = (0.1 + 0.2, math.inf, -math.inf, math.nan)
    for step, loss in enumerate(losses):
        write_steps(record_of(tmp_path / "new", first_step=step, lr=3e-4), [step], loss=loss, aux_loss=0.25 * step)
    path = tmp_path / "new" / "metrics.jsonl"
    strict = path.read_text()
    for text in (strict, re.sub('"(-?Infinity|NaN)"', r"\1", strict)):  # ours, and what Python's json writes by itself
        path.write_text(text)
        record_of(tmp_path / "new", first_step=4, lr=3e-4).close()
        assert path.read_text() == strict, "rewritten when a run goes on"
    assert [json.loads(line, parse_constant=pytest.fail)["loss"] for line in strict.splitlines()] == [
        *(losses[0], "Infinity", "-Infinity", "NaN")
    ]
    records = read_metrics(path)
    assert all(each.keys() == KEYS for each in records)
    assert [each["loss"] for each in records[:3]] == [*losses[:3]] and math.isnan(records[3]["loss"])
    assert [each["tokens"] for each in records] == [TOKENS * (step + 1) for step in range(4)]
    assert [each["aux_loss"] for each in records] == [0.0, 0.25, 0.5, 0.75] and records[0]["grad_norm"] == 1 / 3
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["lr"], config["dp"], config["world_size"], config["corpus_sha256"]) == (3e-4, 1, 1, "abc")
    assert config["model_config"]["layers"] == 4 and config["torch_version"] == torch.__version__


def test_resuming_drops_later_and_half_written_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(record_of(tmp_path), range(6))
    kept = path.read_bytes().splitlines(keepends=True)[:4]
    with path.open("a") as file:
        file.write('{"step": 3, "lo')  # killed here
    record = record_of(tmp_path, first_step=4)
    record.end_step(4, 1.0, {"loss": 2.0, "grad_norm": 1.0})
    records = read_metrics(path)  # before close(): a run that is killed now has lost nothing
    assert [each["step"] for each in records] == list(range(5)) and records[4]["loss"] == 2.0
    assert path.read_bytes().splitlines(keepends=True)[:4] == kept
    write_steps(record_of(tmp_path), range(2))  # a fresh run replaces it
    assert [each["step"] for each in read_metrics(path)] == [0, 1]


def test_a_damaged_record_is_neither_continued_nor_changed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for line in ["rubbish", "[1]", '{"loss": 1.0}', '{"step": null}']:
        path.write_text(text := f'{{"step": 0}}\n{line}\n{{"step": 1}}\n')
        with pytest.raises(UsageError, match="--run-dir .* line 2"):
            record_of(tmp_path, first_step=2)
        assert path.read_text() == text


def all_reduces(folder) -> bool:
    """Two steps with an all-reduce of 10 and then of 1,000 float32. Returns whether this rank writes."""
    record = record_of(folder)
    for step, elements in enumerate((10, 1000)):
        with record.step(step) as measured:
            collectives.all_reduce(torch.ones(elements), record.mesh.world)
            measured.update(loss=1.0, grad_norm=1.0)
    return record.file is not None


def test_comm_bytes_are_those_of_the_step(tmp_path):
    assert run_ranks(2, all_reduces, tmp_path) == [True, False], "rank 0 alone writes"
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [each["comm_bytes"] for each in records] == [{"world": 40}, {"world": 4000}]  # 2(N-1)/N of the tensor
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["backend"], config["nccl_version"]) == ("gloo", None)


def test_ranks_measure_their_peak_at_the_same_time(monkeypatch):
    """They share a CPU; alone, each would find the whole of it."""
    order, measure = [], run_record.peak_flops
    monkeypatch.setattr(run_record.collectives, "barrier", lambda group: order.append(group.name))
    monkeypatch.setattr(run_record, "peak_flops", lambda *args: order.append("measured") or measure(*args))
    record_of(None)
    assert order == ["world", "measured"]


def test_record_names_the_version_of_nccl(monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    record = record_of(None)
    mesh = replace(record.mesh, world=replace(record.mesh.world, backend="nccl"))
    facts = RunRecord(record.config, mesh, BATCHES, 0).facts
    assert [(each["backend"], each["nccl_version"]) for each in (facts, record.facts)] == [
        ("nccl", "2.28.9"),
        (None,) * 2,
    ]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_hfu_counts_what_is_recomputed_and_mfu_does_not(tmp_path, monkeypatch, recompute):
    record, clock = record_of(tmp_path, recompute=recompute), iter([10.0, 12.0])
    monkeypatch.setattr(run_record.time, "perf_counter", lambda: next(clock))
    write_steps(record, [0])
    flops, (result,) = count_flops(record.config.model_config, 256), read_metrics(tmp_path / "metrics.jsonl")
    again = {"none": 0, "selective": flops.attention_core, "full": flops.forward - flops.head}[recompute]
    assert (result["step_time_s"], result["tokens_per_s"]) == (2.0, TOKENS / 2)
    assert result["mfu"] == pytest.approx(8 * 3 * flops.forward / 2 / 1e12, rel=1e-12)  # 8 sequences a step
    assert result["hfu"] == pytest.approx(8 * (3 * flops.forward + again) / 2 / 1e12, rel=1e-12)


def test_peak_flops_are_the_vendors_or_measured_or_given(monkeypatch):
    known = {"A100-SXM4-80GB": 312, "H100 80GB HBM3": 989, "H100 PCIe": 756, "H200 NVL": 835, "B200": 2250}
    measured = ("V100-SXM2-16GB", "A100-SXM4-40GB MIG 3g.20gb", "GB200", "RTX 3090 Ti", "A10G", "L40")
    for name, tflops in (known | {"AMD Instinct MI300X": 1307.4} | dict.fromkeys(measured)).items():
        assert vendor_tflops(name, "bfloat16") == tflops, name
    assert vendor_tflops("Tesla V100-PCIE-16GB", "float16") == 112 and vendor_tflops("NVIDIA L4", "float64") is None
    flops, source = peak_flops("cpu", torch.float32)
    assert flops > 1e8 and "measured" in source and peak_flops("cpu", torch.float32)[0] == flops  # not measured again
    monkeypatch.setattr(utilisation, "_measured", {})
    monkeypatch.setattr(utilisation, "_measure_matmul", lambda device, dtype: 42.0)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert [peak_flops("cuda", dtype)[0] for dtype in (torch.bfloat16, torch.float32)] == [989e12, 494e12]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some New GPU")
    assert peak_flops("cuda", torch.bfloat16)[0] == 42.0
    assert peak_flops("cuda", torch.bfloat16, 0.5) == (0.5e12, "given by --peak-tflops")


@pytest.mark.gpu
def test_a_step_on_cuda_includes_the_work_still_queued(tmp_path):
    record, a = record_of(tmp_path, device="cuda"), torch.randn(8192, 8192, device="cuda")
    with record.step(0) as measured:
        for _ in range(10):
            a = a @ a / 8192
        measured.update(loss=0.0, grad_norm=0.0, lr=0.0)
    least = 10 * 2 * 8192**3 / peak_flops("cuda", torch.float32)[0]
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["step_time_s"] > least
