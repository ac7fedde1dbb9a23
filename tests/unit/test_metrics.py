"""The run record, the progress line and the utilisation figures."""

import io
import json
import math
from types import SimpleNamespace

import pytest
import torch

from common.record import metrics
from common.record.metrics import KEYS, StepLog, hfu, mfu, peak_flops, read_metrics


def record_of(run_dir, **changes):
    settings = {
        "writer": True,
        "total_steps": 10,
        "tokens_per_step": 512,
        "model_flops_per_step": 3e9,
        "hardware_flops_per_step": 4e9,
        "peak_flops": 1e12,
    }
    return StepLog(run_dir, {"lr": 1e-3, "corpus_sha256": "abc", "vocab": None}, **(settings | changes))


def write_steps(record, steps, loss=1.0):
    for step in steps:
        record.begin_step()
        record.end_step(step, loss=loss / (step + 1), grad_norm=0.1, lr=1e-3)
    record.close()


def test_one_object_a_step_with_every_key_at_full_precision(tmp_path):
    record = record_of(tmp_path / "new" / "folder")
    loss, norm = 0.1 + 0.2, torch.tensor(1 / 3, dtype=torch.float64)
    record.begin_step()
    sent = {"dp_cp": 12345678901234567890}
    written = record.end_step(0, loss=loss, grad_norm=norm, lr=1e-3, peak_memory_bytes=7, comm_bytes=sent)
    record.begin_step()
    record.end_step(1, loss=torch.tensor(2.5), grad_norm=None, lr=1e-3, aux_loss=0.25)

    path = tmp_path / "new" / "folder" / "metrics.jsonl"  # read before close(): every line is on its way to the disk
    records, cut_off = read_metrics(path)
    assert not cut_off
    assert [list(r) for r in records] == [list(KEYS)] * 2 and records[0] == written
    assert records[0]["loss"] == loss and records[0]["grad_norm"] == norm.item()
    assert records[0]["comm_bytes"] == sent and records[0]["peak_memory_bytes"] == 7
    assert [r["tokens"] for r in records] == [512, 1024]
    assert records[1]["grad_norm"] is None and records[1]["aux_loss"] == 0.25
    assert len(path.read_text().splitlines()) == 2
    record.close()


def test_nan_and_infinity_stay_valid_json_and_come_back(tmp_path):
    record = record_of(tmp_path)
    for step, value in enumerate((math.nan, math.inf, -math.inf)):
        record.begin_step()
        record.end_step(step, loss=torch.tensor(value), grad_norm=value, lr=1e-3)
    record.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse)["loss"] for line in lines] == ["nan", "inf", "-inf"]
    losses = [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl")[0]]
    assert math.isnan(losses[0]) and losses[1:] == [math.inf, -math.inf]


def test_config_holds_what_repeats_the_run(tmp_path):
    record_of(tmp_path, world_size=4, peak_source="given").close()
    text = (tmp_path / "config.json").read_text()
    config = json.loads(text)
    assert list(config) == sorted(config)
    assert config["corpus_sha256"] == "abc" and config["vocab"] is None and config["world_size"] == 4
    assert config["torch_version"] == torch.__version__ and config["python_version"].startswith("3.")


def test_resuming_drops_later_and_half_written_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(record_of(tmp_path), range(6))
    kept = path.read_bytes().splitlines(keepends=True)[:4]
    with path.open("a") as file:
        file.write('{"step": 3, "lo')  # killed here
    assert read_metrics(path)[1]

    write_steps(record_of(tmp_path, first_step=4), range(4, 10), loss=2.0)
    lines = path.read_bytes().splitlines(keepends=True)
    assert lines[:4] == kept
    records, cut_off = read_metrics(path)
    assert [r["step"] for r in records] == list(range(10)) and not cut_off
    assert records[4]["loss"] == 2.0 / 5
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "metrics.jsonl"}


def test_resuming_tells_of_lines_it_cannot_read(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nrubbish\n[1]\n{"step": 1}\n{"step": 2}')
    record_of(tmp_path, first_step=2).close()
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'
    assert capsys.readouterr().err.count("dropped a line") == 2


def test_resuming_without_an_earlier_record(tmp_path):
    write_steps(record_of(tmp_path, first_step=3), range(3, 5))
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")[0]] == [3, 4]


def test_a_fresh_run_replaces_an_old_record(tmp_path):
    write_steps(record_of(tmp_path), range(5))
    write_steps(record_of(tmp_path), range(2))
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")[0]] == [0, 1]


def test_only_the_writer_writes_and_prints(tmp_path, capsys):
    record = record_of(tmp_path / "run", writer=False)
    record.begin_step()
    assert record.end_step(0, loss=1.0, grad_norm=1.0, lr=1e-3)["tokens_per_s"] > 0
    record.close()
    assert not (tmp_path / "run").exists() and capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("total", "lines"), [(100, 21), (7, 7), (50, 26)])
def test_plain_progress(total, lines, capsys):
    write_steps(record_of(None, total_steps=total), range(total))
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == lines  # every max(1, total // 20) steps and the last
    assert printed[0].split()[:4] == ["step", f"0/{total}", "loss", "1.0000"]
    assert f"{total - 1}/{total}" in printed[-1] and "tokens/s" in printed[-1] and "grad norm" in printed[-1]


def test_bar_on_a_terminal(capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    record = record_of(None, total_steps=10, first_step=4)
    terminal = metrics.sys.stderr
    write_steps(record, range(4, 10))
    assert "10/10" in terminal.getvalue() and "grad norm 0.1000" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_time_throughput_and_utilisation(monkeypatch):
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    record = record_of(None, writer=False, world_size=4, peak_flops=1e9)
    record.begin_step()
    result = record.end_step(0, loss=1.0, grad_norm=1.0, lr=1e-3)
    assert (result["step_time_s"], result["tokens_per_s"]) == (2.0, 256.0)
    assert result["mfu"] == mfu(3e9, 2.0, 4, 1e9) == 3e9 / (2.0 * 4 * 1e9)
    assert result["hfu"] == hfu(4e9, 2.0, 4, 1e9) == 0.5


@pytest.mark.parametrize(
    ("name", "kind", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "float16", 835),
        ("NVIDIA H200", "tf32", 494),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L40S", "bfloat16", 362),
        ("NVIDIA A10", "bfloat16", 125),
        ("Tesla V100-PCIE-16GB", "float16", 112),
        ("Tesla V100-SXM2-32GB", "float32", 15.7),
        ("NVIDIA GeForce RTX 3090", "bfloat16", 71),
        ("NVIDIA GeForce RTX 4090", "float32", 82.6),
        ("AMD Instinct MI250X", "bfloat16", 191.5),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
        # no number: measured
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bfloat16", None),
        ("NVIDIA GB200", "bfloat16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bfloat16", None),
        ("NVIDIA A10G", "bfloat16", None),
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA L4", "float64", None),
    ],
)
def test_vendors_numbers(name, kind, tflops):
    assert metrics._vendor_tflops(name, kind) == tflops


def test_peak_flops_says_where_it_comes_from(monkeypatch):
    assert peak_flops("cpu", torch.float32, 0.5) == (0.5e12, "given by --peak-tflops")
    monkeypatch.setattr(metrics, "_measured", {})
    monkeypatch.setattr(metrics, "_measure_matmul", lambda device, dtype: 42.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert peak_flops("cuda", torch.bfloat16)[0] == 989e12
    assert peak_flops("cuda", torch.float32)[0] == 67e12
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    assert peak_flops("cuda", torch.float32)[0] == 494e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some New GPU")
    flops, source = peak_flops("cuda", torch.bfloat16)
    assert flops == 42.0 and "Some New GPU" in source and "measured" in source


def test_peak_flops_of_a_cpu_is_measured_once(monkeypatch):
    monkeypatch.setattr(metrics, "_measured", {})
    flops, source = peak_flops("cpu", torch.float32)
    assert flops > 1e8 and "measured" in source
    assert peak_flops("cpu", torch.float32) == (flops, source)  # not measured again: two would differ


@pytest.mark.gpu
def test_a_step_on_cuda_includes_the_work_still_queued():
    flops, _ = peak_flops("cuda", torch.float32)
    record = record_of(None, writer=False, device="cuda", peak_flops=flops)
    a = torch.randn(8192, 8192, device="cuda")
    record.begin_step()
    for _ in range(10):
        a = a @ a / 8192
    seconds = record.end_step(0, loss=0.0, grad_norm=0.0, lr=0.0)["step_time_s"]
    assert seconds > 10 * 2 * 8192**3 / flops  # no faster than the hardware
