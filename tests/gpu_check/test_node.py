"""Our tracer beside PyTorch's profiler; the links of all GPUs, and what each dimension of parallelism makes of them."""

import json
import statistics
import sys
from pathlib import Path

import pytest

from common.experiments.links import measure
from common.launching.launch import end_cleanly
from common.process_groups import Degrees, build_mesh
from common.start import environment, init_distributed
from common.tracing.chrome_trace import read_trace, time_by_state
from step01_single_gpu.running.gpu_kernels import classify_kernels
from tests.gpu_check.findings import Findings, on_devices
from tests.gpu_check.launching import train_alone, visible_gpus
from tests.harness.ranks import run_script, steps_of, torchrun

TINY = "--layers 2 --hidden 32 --heads 4 --ffn 48 --vocab 256 --dtype bfloat16 --global-batch {} --micro-batch {}"
TINY += " --seq-len {}"


def kineto_events(found: Findings, name: str) -> list[dict]:
    """Return the events of a run that torch.profiler has seen."""
    return json.loads((found.folder / name / "profile" / "rank-0.json").read_text())["traceEvents"]


@on_devices([""], quick=[""])
def test_tracer(found, item):
    """What our tracer says of the phases of a step, against the kernels that Kineto saw."""
    model_flags = "--model smollm-135m --dtype bfloat16 --seq-len 1024 --micro-batch 8 --global-batch 16"
    model_flags = TINY.format(2, 1, 16) if found.quick else model_flags
    train_alone(found, "run", 1, f"{model_flags} --data synthetic --steps 6 --trace 4:5 --profile")
    rows, ratio = compare_clocks(read_trace(found.folder / "run").spans[0], kineto_events(found, "run"))
    found.note("ms of two steps", [("phase", "our tracer", "kernels in it", "ratio"), *rows])
    assert {row[0] for row in rows} == {"forward", "backward", "optimizer"}
    if found.device.type == "cuda":
        found.note("two steps by our tracer / by Kineto", f"{ratio:.3f}")
        assert 0.95 < ratio < 1.1


def compare_clocks(spans: list[dict], events: list[dict]) -> tuple[list[tuple[str, ...]], float | None]:
    """Return the times of each phase, ours and of the kernels within, and the ratio of the whole.

    The two traces have different clocks. Both end when the last kernel does.
    """

    def times(items: list[dict], shift: float = 0.0) -> list[tuple[float, float]]:
        return [(each["ts"] + shift, each["ts"] + each["dur"] + shift) for each in items]

    steps = times([span for span in spans if span["cat"] == "step"])
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    end = max(stop for _, stop in steps)
    kernels = times(kernels, end - max((stop for _, stop in times(kernels)), default=0.0))
    phases, rows = [span for span in spans if span["cat"] == "phase"], []
    for name in dict.fromkeys(phase["name"] for phase in phases):
        intervals = times([phase for phase in phases if phase["name"] == name])
        ours = sum(stop - start for start, stop in intervals)
        theirs = time_by_state(intervals, kernels).get((True, True), 0.0) if kernels else 0.0
        rows.append((name, f"{ours / 1e3:.2f}", f"{theirs / 1e3:.2f}", f"{theirs / ours:.3f}"))
    return rows, (end - min(steps)[0]) / (end - min(kernels)[0]) if kernels else None


SIZES, TRIES = [1 << 20, 1 << 24, 1 << 28], 10  # bytes of a message
STEPS, WARM = 8, 3  # steps: the last is profiled, for which the one before warms up
TIME = 150  # seconds for a run
SHAPES = {
    "dense": "--model smollm-1.7b --seq-len 2048 --micro-batch 2 --global-batch 32",
    "long": "--model llama3-1b --layers 8 --seq-len 16384 --micro-batch 1 --global-batch 4",
    "experts": "--model smollm-1.7b --layers 8 --experts 8 --expert-ffn 2048 --seq-len 2048 --micro-batch 2"
    " --global-batch 32",
}
HEADER = ["dimension", "tokens/s", "predicted, no message hidden", "predicted, all hidden", "MB sent"]
HEADER += ["communication ms", "overlapped", "exposed ms", "idle ms"]


QUEUE = "tp, one hardware queue"  # CUDA_DEVICE_MAX_CONNECTIONS=1
CASES = {  # a shape, the flags that divide it over all GPUs, and the exchange on which its prediction rests
    "dp": ("dense", "", "all-reduce"),
    "dp, buckets of 100 MB": ("dense", "--bucket-mb 100", "all-reduce"),
    "ZeRO-2": ("dense", "--zero 2", "reduce-scatter"),
    "ZeRO-3": ("dense", "--zero 3", "all-gather"),
    "tp": ("dense", "--tp {}", "all-gather"),
    QUEUE: ("dense", "--tp {}", "all-gather"),
    "pp": ("dense", "--pp {} --micro-batch 1", "message"),
    "cp": ("long", "--cp {}", "message"),
    "ep": ("experts", "--ep {}", "all-to-all"),
}


@on_devices(CASES, quick=["pp"])
def test_dimension(found, item):
    """Tokens/s beside two predictions from one GPU and the links; how many messages are hidden."""
    (shape, flags, exchange), ranks = CASES[item], 2 if found.device.type == "cpu" else len(visible_gpus())
    if ranks == 1:
        pytest.skip("one GPU has nobody to talk to")
    links, alone = links_of(found, ranks), f"{shape} on one"
    train(found, alone, 1, shape)
    train(found, item, ranks, shape, flags.format(ranks), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if item == QUEUE else {})
    one, all_ = (speed(found, each) for each in (alone, item))
    tokens, sent = one["tokens"], sum(steps_of(found.folder / item)[WARM]["comm_bytes"].values())
    bandwidth = next(rows[-1][2] for name, rows in links.items() if exchange in name)
    fastest = predicted(tokens / one["speed"], ranks, json.loads((found.folder / item / "config.json").read_text()))
    events = [] if found.quick else kineto_events(found, item)
    cells = [all_["speed"], tokens / (fastest + sent / bandwidth), tokens / fastest, 1e-6 * sent]
    cells = [item, *(f"{each:,.0f}" for each in cells), *communication(events)]
    found.row(f"{ranks} ranks: tokens/s measured and predicted", HEADER, cells)
    assert all_["loss"] == pytest.approx(one["loss"], rel=1e-2)


def run(ranks: int, *command, forked: bool = False, **options) -> None:
    """A command under torchrun, or on forked ranks. Raises AssertionError with what was printed if that fails."""
    if forked:
        done = run_script(*command, ranks=ranks, timeout=TIME)
    else:
        done = torchrun(ranks, *command, timeout=TIME, **options)
    assert done.returncode == 0, done.stderr.strip()[-600:]


def links_of(found: Findings, ranks: int) -> dict:
    """What `common.experiments.links` measures, once in a check."""
    file = found.folder / "links.json"
    if not file.exists():
        found.folder.mkdir(parents=True, exist_ok=True)
        sizes = SIZES[: 1 if found.quick else None]
        run(ranks, "-m", "tests.gpu_check.test_node", file, found.device.type, *sizes)
        links = json.loads(file.read_text())
        rows = [(name, f"{size:,}", f"{1e-9 * speed:.2f}") for name, row in links.items() for size, _, speed, *_ in row]
        found.note("speed of the links", [("exchange", "bytes", "GB/s"), *rows])
    return json.loads(file.read_text())


def train(found: Findings, name: str, ranks: int, shape: str, flags: str = "", environment: dict | None = None) -> None:
    """Train on so many GPUs, into a folder of that name, unless that has been done."""
    if len(steps_of(found.folder / name)) == STEPS:
        return
    shape = TINY.format(4, 1, 64) if found.quick else f"{SHAPES[shape]} --dtype bfloat16"
    flags = f"{shape} {flags} --data synthetic --warmup 2 --steps {STEPS} --device {found.device.type}"
    flags += "" if found.quick else f" --trace {STEPS - 1}:{STEPS - 1} --profile"
    command = ["step08_5d/train.py", *flags.split(), "--run-dir", found.folder / name]
    run(ranks, *command, forked=found.device.type == "cpu", env=environment)


def predicted(seconds: float, ranks: int, config: dict) -> float:
    """Return the seconds of a step that hides all messages: its share of one GPU's, and the bubble."""
    micro_batches = config["global_batch"] // config["micro_batch"]
    return seconds / ranks * (micro_batches + config["pp"] - 1) / micro_batches


def communication(events: list[dict]) -> list[str]:
    """Return of a profiled step: ms of NCCL's kernels, the share beside others, ms alone, idle ms."""
    times = classify_kernels(events)
    if not times:
        return ["-"] * 4
    share = times["overlapped"] / times["communication"] if times["communication"] else 0.0
    whole, exposed, idle = (f"{1e3 * times[each]:.2f}" for each in ("communication", "exposed", "idle"))
    return [whole, f"{share:.0%}", exposed, idle]


def speed(found: Findings, name: str) -> dict[str, float]:
    """Return the median tokens/s of a run, the tokens of a step, and the last loss."""
    lines = steps_of(found.folder / name)
    tokens = lines[1]["tokens"] - lines[0]["tokens"]
    middle = statistics.median(line["tokens_per_s"] for line in lines[WARM : STEPS - 2])
    return {"speed": middle, "tokens": tokens, "loss": lines[-1]["loss"]}


def measure_links(file: Path, device: str, sizes: list[int]) -> None:
    """On the ranks that have been started: rank 0 writes what `common.experiments.links` measures."""
    mesh = build_mesh(Degrees(dp=environment().world_size), init_distributed(device))
    links = measure(mesh, sizes, TRIES)
    if mesh.rank == 0:
        file.write_text(json.dumps(links))


if __name__ == "__main__":
    end_cleanly(lambda: measure_links(Path(sys.argv[1]), sys.argv[2], [int(each) for each in sys.argv[3:]]))
