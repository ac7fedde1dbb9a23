"""The run record, how much of the hardware a run used, and peak memory; and the comparison of records."""

import errno
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.compare import compare, labels, main, notes, read_run, relative_difference
from common.config import TrainConfig
from common.costs.hardware import vendor_tflops
from common.counts import count_flops
from common.errors import UsageError
from common.launching.run_mesh import mesh_of
from common.measure.storages import live_bytes
from common.metrics import read_metrics
from common.start import environment
from step01_single_gpu.running import run_record, utilisation
from step01_single_gpu.running.memory_meter import Allocation, MemoryMeter, _known
from step01_single_gpu.running.run_record import RunRecord
from step01_single_gpu.running.utilisation import peak_flops

KEYS = {"step", "loss", "aux_loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "mfu", "hfu"}
KEYS |= {"peak_memory_bytes", "comm_bytes"}
TOKENS = 512  # per step
CORPUS = SimpleNamespace(name="none", sha256="abc", tokens_sha256="def", tokens=range(1000))
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
    losses, path = (0.1 + 0.2, math.inf, -math.inf, math.nan), tmp_path / "new" / "metrics.jsonl"
    for step, loss in enumerate(losses):  # each continues the record
        write_steps(record_of(tmp_path / "new", first_step=step, lr=3e-4), [step], loss=loss, aux_loss=0.25 * step)
    strict = [json.loads(line, parse_constant=pytest.fail)["loss"] for line in path.read_text().splitlines()]
    assert strict == [losses[0], "Infinity", "-Infinity", "NaN"]
    with path.open("a") as file:
        file.write('{"step": 3, "lo')  # killed here
    records = read_metrics(path)
    assert all(each.keys() == KEYS for each in records)
    assert [each["loss"] for each in records[:3]] == [*losses[:3]] and math.isnan(records[3]["loss"])
    assert [each["tokens"] for each in records] == [TOKENS * (step + 1) for step in range(4)]
    assert [each["aux_loss"] for each in records] == [0.0, 0.25, 0.5, 0.75] and records[0]["grad_norm"] == 1 / 3
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["lr"], config["dp"], config["world_size"], config["corpus_sha256"]) == (3e-4, 1, 1, "abc")
    record_of(tmp_path / "new", first_step=2).close()
    assert [each["step"] for each in read_metrics(path)] == [0, 1], "later lines, and half of one, are dropped"


def test_a_full_disk_leaves_the_earlier_record(tmp_path, monkeypatch):
    write_steps(record_of(tmp_path, lr=3e-4), [0])
    before = {name: (tmp_path / name).read_text() for name in ("config.json", "metrics.jsonl")}

    def half(path, text, **options):
        path.write_bytes(text[: len(text) // 2].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(UsageError, match="--run-dir .* cannot be written: No space left"):
        record_of(tmp_path, first_step=1, lr=1e-4)
    assert {name: (tmp_path / name).read_text() for name in before} == before


def test_a_damaged_record_is_neither_continued_nor_changed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for line in ["[1]", '{"loss": 1.0}']:
        path.write_text(text := f'{{"step": 0}}\n{line}\n{{"step": 1}}\n')
        with pytest.raises(UsageError, match="--run-dir .* line 2"):
            record_of(tmp_path, first_step=2)
        assert path.read_text() == text


def test_ranks_measure_their_peak_at_the_same_time(monkeypatch):
    """They share a CPU; alone, each would find the whole of it."""
    order, measure = [], run_record.peak_flops
    monkeypatch.setattr(run_record.collectives, "barrier", lambda group: order.append(group.name))
    monkeypatch.setattr(run_record, "peak_flops", lambda *args: order.append("measured") or measure(*args))
    record_of(None)
    assert order == ["world", "measured"]


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


def test_a_measured_peak_is_that_of_the_fastest_product(monkeypatch):
    """Of 2 n^3 FLOPs: other programs can only slow a product down. Another type has a peak of its own."""
    clock = 0.0, 0.0, 0.1, 0.1, 0.1, 0.14, 0.14, 0.14, 0.2, 0.25  # three products; it stops after 0.2 s
    seconds = iter((*clock, *(2 * each for each in clock)))  # then one product takes all of it
    monkeypatch.setattr(utilisation, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(utilisation, "_measured", {})
    source = "this CPU, {}: measured, the fastest matrix product"
    for _ in range(2):
        assert peak_flops("cpu", torch.float32) == (pytest.approx(2 * 1024**3 / 0.04), source.format("float32"))
    assert peak_flops("cpu", torch.float64) == (pytest.approx(2 * 1024**3 / 0.2), source.format("float64"))


def test_peak_flops_are_the_vendors_or_measured_or_given(monkeypatch):
    known = {"A100-SXM4-80GB": 312, "H100 80GB HBM3": 989, "H100 PCIe": 756, "H200 NVL": 835, "B200": 2250}
    known |= {"GB200": 2500, "AMD Instinct MI300X": 1307.4}
    measured = ("V100-SXM2-16GB", "A100-SXM4-40GB MIG 3g.20gb", "GB10", "RTX 3090 Ti", "A10G", "L40")
    for name, tflops in (known | dict.fromkeys(measured)).items():
        assert vendor_tflops(name, "bfloat16") == tflops, name
    assert vendor_tflops("Tesla V100-PCIE-16GB", "float16") == 112 and vendor_tflops("NVIDIA L4", "float64") is None
    flops, source = peak_flops("cpu", torch.float32)
    assert flops > 1e8 and "measured" in source and peak_flops("cpu", torch.float32)[0] == flops  # not measured again
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert [peak_flops("cuda", dtype)[0] for dtype in (torch.bfloat16, torch.float32)] == [989e12, 494e12]
    assert peak_flops("cuda", torch.bfloat16, 0.5) == (0.5e12, "given by --peak-tflops")


@pytest.mark.gpu
def test_a_step_on_cuda_includes_the_work_still_queued(tmp_path):
    record, a = record_of(tmp_path, device="cuda"), torch.randn(8192, 8192, device="cuda")
    with record.step(0) as measured:
        for _ in range(10):
            a = a @ a / 8192
        measured.update(loss=a.mean().item(), grad_norm=0.0, lr=0.0)  # the host waits here, as in `Run.log`
    least = 10 * 2 * 8192**3 / peak_flops("cuda", torch.float32)[0]
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["step_time_s"] > least


MB = 10**6


def megabytes(count):
    return torch.empty(count * MB, dtype=torch.uint8)


def test_the_peak_is_exact():
    """And what was there at the beginning counts until it is freed."""
    with MemoryMeter("cpu").measure():
        old = megabytes(6)
    with MemoryMeter("cpu").measure(baseline=[old, old[1:]]) as memory:
        a = megabytes(3)
        b = megabytes(5)
        del a, old
        c = megabytes(4)
        del b
        d = megabytes(2)
    assert memory.baseline_bytes == 6 * MB and memory.peak_bytes == 14 * MB
    levels = itertools.accumulate((event.bytes for event in memory.allocations), initial=memory.baseline_bytes)
    assert [level // MB for level in levels] == [6, 9, 14, 11, 5, 9, 4, 6]
    assert live_bytes([c, d, c[1:]]) == 6 * MB


def test_releases_that_the_allocator_does_not_report_as_they_were():
    # 200 is alive at entry with 7 bytes, but the allocator remembers another size; nothing is known of 300. Blocks that
    # others overlap, as the last two overlap 100 and 400, were released unseen
    changes = [(100, 10), (200, -500), (300, -400), (100, -10), (100, 50), (90, 20), (420, 10)]
    found = _known([Allocation(0.0, *each) for each in changes], {200: 7, 400: 30})
    expected = [(100, 10), (200, -7), (100, -10), (100, 50), (100, -50), (90, 20), (400, -30), (420, 10)]
    assert [(event.address, event.bytes) for event in found] == expected


def test_nothing_is_measured_when_switched_off_inside_another_profiler_or_after_an_error(capfd):
    with MemoryMeter("cpu", on_cpu=False).measure() as off:
        megabytes(1)
    with torch.autograd.profiler.profile(), MemoryMeter("cpu").measure() as inside:
        megabytes(1)
    with pytest.raises(ZeroDivisionError), MemoryMeter("cpu").measure() as failed:
        1 / 0  # noqa: B018
    assert off.peak_bytes is inside.peak_bytes is failed.peak_bytes is None
    with MemoryMeter("cpu").measure() as memory:
        megabytes(2)
    assert memory.peak_bytes == 2 * MB and capfd.readouterr() == ("", "")


@pytest.mark.gpu
def test_the_peak_on_cuda():
    before = torch.empty(4 * 2**20, dtype=torch.uint8, device="cuda")
    with MemoryMeter("cuda").measure() as memory:
        inside = torch.empty(8 * 2**20, dtype=torch.uint8, device="cuda")
        del inside
    assert memory.baseline_bytes >= before.nbytes
    assert memory.peak_bytes == memory.baseline_bytes + 8 * 2**20 and memory.allocations == []


# ---- the comparison of runs ------------------------------------------------------------------------------------------


def write_run(path, losses, norms=None, config=None):
    """A run directory with these curves; config None writes no config.json."""
    path.mkdir(exist_ok=True)
    curves = enumerate(zip(losses, norms or [1.0] * len(losses)))
    lines = [{"step": step, "loss": loss, "grad_norm": norm, "tokens_per_s": 100.0} for step, (loss, norm) in curves]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config is not None:
        (path / "config.json").write_text(json.dumps({"corpus_sha256": "abc", "lr": 1e-3} | config))
    return path


@pytest.fixture
def pair(tmp_path):
    """Reference and a run that differs by 1e-3 in loss at step 1 and by 0.5 in gradient norm at step 2."""
    one = write_run(tmp_path / "one", [4.0, 2.0, 1.0], [1.0, 1.0, 2.0], {})
    return one, write_run(tmp_path / "two", [4.0, 2.002, 1.0], [1.0, 1.0, 1.0], {})


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """The command without its picture, whose drawing takes most of the time: status, stdout and stderr."""
    monkeypatch.setattr("common.compare.plot", lambda *arguments: None)
    return lambda *arguments: (main([*map(str, arguments), "--out", str(tmp_path / "x.png")]), *capsys.readouterr())


def test_relative_difference():
    assert relative_difference(2.0, 2.5) == 0.25 and relative_difference(-2.0, 2.0) == 2.0
    assert relative_difference(0.0, 0.0) == 0.0 and relative_difference(0.0, 1e-300) > 1e7
    assert relative_difference(math.nan, math.nan) == relative_difference(math.inf, math.inf) == 0.0
    for a, b in ((math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (math.inf, -math.inf)):
        assert relative_difference(a, b) == math.inf


def test_exit_status(pair, command):
    assert command(*pair)[0] == 0, "without a tolerance only what cannot be compared fails"
    status, out, err = command(*pair, "--tolerance", "0.4")
    assert status == 1 and "FAIL two: grad_norm differs by 5.00e-01 at step 2" in out and err == ""
    for options in ("--tolerance 0.5", "--tolerance 0.4 --key loss", "--tolerance 0.4 --steps 2"):
        assert command(*pair, *options.split())[0] == 0, options
    assert command(pair[0], pair[0], "--tolerance", "0")[0] == 0


def test_what_cannot_be_compared_exits_with_2_and_one_line(pair, tmp_path, command):
    for name, text, message in [
        ("metrics.jsonl", "", "holds no step"),
        ("metrics.jsonl", '{"step": 0}\n{broken\n', "line 2 is not the record"),
        ("metrics.jsonl", '{"step": 0, "loss": "x"}\n', "not a number"),
        ("metrics.jsonl", '{"step": 9}\n', "no step to compare in common"),
        ("config.json", "[1]", "cannot be read"),
        ("config.json", '{"corpus_sha256": "other", "corpus": "b.txt"}', "different corpora: --data None and b.txt"),
    ]:
        other = write_run(tmp_path / "other", [4.0], config={})
        (other / name).write_text(text)
        status, _, err = command(pair[0], other, "--tolerance", "1e9")
        assert status == 2 and message in err and str(other) in err and err.count("\n") == 1
    for argument in ("--key=", "--steps=0", "--key=nothing", "--tolerance=nan", "--tolerance=-1"):
        status, _, err = command(pair[0], argument)
        assert status == 2 and err.count("\n") == 1, argument


def test_the_speed_in_the_table_is_that_of_all_steps(tmp_path, command):
    """Their median, also where fewer are compared: of a run's first steps most are slow."""
    run = write_run(tmp_path / "one", [4.0, 3.0, 2.0, 1.0, 0.5])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = (10.0, 100.0, 1300.0, 1200.0, 1250.0)
    text = "".join(json.dumps(line | {"tokens_per_s": speed}) + "\n" for line, speed in zip(lines, speeds))
    (run / "metrics.jsonl").write_text(text)
    for options in ("", "--steps 2"):
        row = command(run, *options.split())[1].splitlines()[1].split()
        assert row[:4] == ["one", "5", "0.500000", "1,200"], row


def test_labels_name_the_layout(tmp_path):
    step02 = {"step_name": "step02_data_parallel", "dp": 2, "dp_mode": "naive", "lr": 0.5, "micro_batch": 2}
    step05 = {"step_name": "step05_pipeline", "dp": 1, "sequence_parallel": False, "bucket_mb": 1.0, "schedule": "zbv"}
    configs = {"a": {"step_name": "step01_single_gpu", "dp": 1}, "b": step02, "c": step02, "d": {"dp": 2}, "e": step05}
    runs = [read_run(write_run(tmp_path / name, [1.0], config=config)) for name, config in configs.items()]
    second, last = "step02 dp 2 dp-mode naive", "step05 bucket-mb 1 no-sequence-parallel schedule zbv"
    assert labels(runs) == ["step01", f"{second} (b)", f"{second} (c)", "d", last]


def test_notes_name_other_settings_and_what_was_left_out(tmp_path):
    settings = {"seed": 0, "dp": 1, "model_config": {"layers": 2}, "tokens_sha256": "a"}
    other = {"seed": 1, "dp": 2, "layers": 3, "model_config": {"layers": 3}, "tokens_sha256": "b"}
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    write_run(one, [1.0], config=settings), write_run(two, [1.0, 1.0], config=other), write_run(three, [])
    (three / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0, "grad_norm": 1.0}\n{"step": 3, "loss"')
    found = " ".join(notes(compare([read_run(each) for each in (one, two, three)])))
    for words in (
        "two: has 2 steps",
        "two: has layers 3 instead of 2, seed 1 instead of 0",
        "three: no corpus_sha256",
        "two: has other tokens",
    ):
        assert words in found
