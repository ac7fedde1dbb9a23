"""The run record: what a run leaves on disk and shows, how it is continued, and how much of the hardware it used."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from common import collectives
from common.config import TrainConfig
from common.counts import count_flops
from common.errors import UsageError
from common.process_groups import Degrees, build_mesh, environment
from common.record import hardware, run_record
from common.record.hardware import peak_flops, vendor_tflops
from common.record.run_record import RunRecord, read_metrics
from tests.harness.ranks import run_ranks

KEYS = {"step", "loss", "aux_loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "mfu", "hfu"}
KEYS |= {"peak_memory_bytes", "comm_bytes"}
TOKENS = 512  # per step


def record_of(run_dir, first_step=0, device="cpu", **flags) -> RunRecord:
    """The record of one rank of a run of ten steps."""
    world, flags = environment().world_size, {"steps": 10, "peak_tflops": 1.0} | flags
    config = TrainConfig(run_dir=run_dir and str(run_dir), **flags)
    config.resolve_and_check(world)
    mesh = build_mesh(Degrees(dp=world), torch.device(device), config.model_config.kv_heads)
    corpus = SimpleNamespace(name="none", sha256="abc", tokens=range(1000))
    return RunRecord(config, mesh, SimpleNamespace(corpus=corpus, target_tokens=TOKENS), first_step)


def write_steps(record, steps, loss=1.0):
    for step in steps:
        with record.step(step) as measured:
            measured.update(loss=loss / (step + 1), grad_norm=0.1, lr=1e-3)
    record.close()


# ---- on disk ---------------------------------------------------------------------------------------------------------


def test_one_object_a_step_with_every_key_at_full_precision(tmp_path):
    record = record_of(tmp_path / "new" / "folder")
    for step, loss in enumerate((0.1 + 0.2, math.nan, math.inf, -math.inf)):
        with record.step(step) as measured:
            measured.update(loss=loss, grad_norm=1 / 3, lr=1e-3)
    with record.step(4) as measured:
        measured.update(loss=1.0, grad_norm=1.0, lr=1e-3, aux_loss=0.25)
    records, cut_off = read_metrics(tmp_path / "new" / "folder" / "metrics.jsonl")  # before close(): a kill loses none
    assert not cut_off and all(each.keys() == KEYS for each in records)
    losses = [each["loss"] for each in records]
    assert losses[0] == 0.1 + 0.2 and math.isnan(losses[1]) and losses[2:] == [math.inf, -math.inf, 1.0]
    assert [each["tokens"] for each in records] == [TOKENS * (step + 1) for step in range(5)]
    assert [each["aux_loss"] for each in records] == [0.0] * 4 + [0.25] and records[0]["grad_norm"] == 1 / 3
    record.close()


def test_config_holds_what_repeats_the_run(tmp_path):
    record_of(tmp_path, lr=3e-4, layers=2).close()
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["lr"], config["dp"], config["world_size"], config["corpus_sha256"]) == (3e-4, 1, 1, "abc")
    assert config["model_config"]["layers"] == 2 and config["torch_version"] == torch.__version__


def test_resuming_drops_later_and_half_written_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(record_of(tmp_path), range(6))
    kept = path.read_bytes().splitlines(keepends=True)[:4]
    with path.open("a") as file:
        file.write('{"step": 3, "lo')  # killed here
    assert read_metrics(path)[1]
    write_steps(record_of(tmp_path, first_step=4), range(4, 10), loss=2.0)
    assert path.read_bytes().splitlines(keepends=True)[:4] == kept
    records, cut_off = read_metrics(path)
    assert [each["step"] for each in records] == list(range(10)) and not cut_off and records[4]["loss"] == 2.0 / 5
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "metrics.jsonl"}
    write_steps(record_of(tmp_path), range(2))  # a fresh run replaces it
    assert [each["step"] for each in read_metrics(path)[0]] == [0, 1]


@pytest.mark.parametrize("line", ["rubbish", "[1]", '{"loss": 1.0}', '{"step": null}'])
def test_a_damaged_record_is_neither_continued_nor_changed(tmp_path, line):
    text = f'{{"step": 0}}\n{line}\n{{"step": 1}}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UsageError, match="--run-dir .* line 2"):
        record_of(tmp_path, first_step=2)
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_a_run_dir_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--run-dir .*file.* cannot be written"):
        record_of(tmp_path / "file")


@pytest.mark.parametrize(("total", "lines"), [(100, 21), (7, 7), (50, 26)])
def test_progress(total, lines, capsys):
    write_steps(record_of(None, steps=total), range(total))
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == lines  # every max(1, total // 20) steps and the last
    assert printed[0].split()[:4] == ["step", f"0/{total}", "loss", "1.0000"] and f"{total - 1}/{total}" in printed[-1]


# ---- numbers ---------------------------------------------------------------------------------------------------------


def train_on_ranks(folder) -> dict | None:
    """Two steps with an all-reduce of 10 and then of 1,000 float32; the records, on rank 0."""
    record = record_of(folder)
    for step, elements in enumerate((10, 1000)):
        with record.step(step) as measured:
            collectives.all_reduce(torch.ones(elements), record.mesh.dp)
            measured.update(loss=1.0, grad_norm=1.0, lr=1.0)
    record.close()
    return read_metrics(folder / "metrics.jsonl")[0] if record.mesh.rank == 0 else None


def test_comm_bytes_are_those_of_the_step(tmp_path):
    """A ring all-reduce of n bytes on 2 ranks sends n bytes from each; only rank 0 writes."""
    records, nothing = run_ranks(2, train_on_ranks, tmp_path)
    assert [sum(each["comm_bytes"].values()) for each in records] == [40, 4000] and nothing is None


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_utilisation_counts_recomputation_in_hfu_only(tmp_path, monkeypatch, recompute):
    record = record_of(tmp_path, recompute=recompute, global_batch=8)
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(run_record.time, "perf_counter", lambda: next(clock))
    write_steps(record, [0])
    flops, (result,) = (
        count_flops(record.config.model_config, record.config.seq_len),
        read_metrics(tmp_path / "metrics.jsonl")[0],
    )
    again = {"none": 0, "selective": flops.attention_core, "full": flops.forward - flops.head}[recompute]
    assert (result["step_time_s"], result["tokens_per_s"]) == (2.0, TOKENS / 2)
    assert result["mfu"] == pytest.approx(8 * 3 * flops.forward / 2 / 1e12, rel=1e-12)
    assert result["hfu"] == pytest.approx(8 * (3 * flops.forward + again) / 2 / 1e12, rel=1e-12)


def test_vendors_numbers():
    for name, kind, tflops in (
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "float16", 835),
        ("NVIDIA H200", "tf32", 494),
        ("NVIDIA B200", "bfloat16", 2250),
        ("Tesla V100-PCIE-16GB", "float16", 112),
        ("Tesla V100-SXM2-32GB", "float32", 15.7),
        ("NVIDIA GeForce RTX 4090", "float32", 82.6),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
        # no number: measured
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bfloat16", None),
        ("NVIDIA GB200", "bfloat16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bfloat16", None),
        ("NVIDIA A10G", "bfloat16", None),
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA L4", "float64", None),
    ):
        assert vendor_tflops(name, kind) == tflops, name


def test_peak_flops_says_where_it_comes_from(monkeypatch):
    assert peak_flops("cpu", torch.float32, 0.5) == (0.5e12, "given by --peak-tflops")
    flops, source = peak_flops("cpu", torch.float32)
    assert flops > 1e8 and "measured" in source
    assert peak_flops("cpu", torch.float32) == (flops, source)  # not measured again: two would differ
    monkeypatch.setattr(hardware, "_measured", {})
    monkeypatch.setattr(hardware, "_measure_matmul", lambda device, dtype: 42.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert peak_flops("cuda", torch.bfloat16)[0] == 989e12
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    assert peak_flops("cuda", torch.float32)[0] == 494e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some New GPU")
    flops, source = peak_flops("cuda", torch.bfloat16)
    assert flops == 42.0 and "Some New GPU" in source and "measured" in source


@pytest.mark.gpu
def test_a_step_on_cuda_includes_the_work_still_queued(tmp_path):
    flops, _ = peak_flops("cuda", torch.float32)
    record, a = record_of(tmp_path, device="cuda"), torch.randn(8192, 8192, device="cuda")
    with record.step(0) as measured:
        for _ in range(10):
            a = a @ a / 8192
        measured.update(loss=0.0, grad_norm=0.0, lr=0.0)
    record.close()
    assert read_metrics(tmp_path / "metrics.jsonl")[0][0]["step_time_s"] > 10 * 2 * 8192**3 / flops
