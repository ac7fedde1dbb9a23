"""Run the file of gpu-08-a on a GPU, and write what its streams did when to trace.json beside it.

    python -m step08_5d.labs.profiled runs/labs/gpu-08-a/borrowed.py

The lab's check counts in this file; ui.perfetto.dev draws it. Nothing of the project but this runs in the process.
"""

import hashlib
import importlib.util
import json
import sys
import traceback
from pathlib import Path

import common.entry  # noqa: F401 (before torch: one thread per process by default)

# isort: split
import torch

from common.errors import UsageError, first_line
from common.launching.command_line import OneLineParser, one_line_errors, summary

LAYERS, WIDTH, TOKENS = 12, 4096, 16384  # copies of 34 MB, and products of 0.55 TFLOP, so both take about a millisecond
DEVICE = "cuda"  # tests say otherwise
WARM_UP = 2  # forwards before the one that is traced


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the file, and write its trace."""
    parser = OneLineParser(prog="python -m step08_5d.labs.profiled", description=summary(__doc__), allow_abbrev=False)
    parser.add_argument("file", type=Path, help="borrowed.py")
    file = parser.parse_args(argv).file.resolve()
    if not file.is_file():
        raise UsageError(f"{file} is missing")
    if not torch.cuda.is_available():
        raise UsageError("gpu-08-a needs a GPU, and PyTorch finds none here")
    print(write_trace(file))


def write_trace(file: Path) -> Path:
    """Trace the last of a few forwards. Returns the path of the trace, whose "lab" holds what a trace does not show.

    Raises UsageError if the file cannot be run, with its line.
    """
    torch.manual_seed(0)
    draw = {"dtype": torch.float16, "device": DEVICE}
    x = torch.randn(TOKENS, WIDTH, **draw)
    host = [(torch.randn(WIDTH, WIDTH, **draw) * (2 / WIDTH) ** 0.5).cpu().pin_memory() for _ in range(LAYERS)]
    right = x
    for matrix in host:
        right = torch.relu(right @ matrix.to(DEVICE))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        for _ in range(WARM_UP):
            module.forward(host, x)
        with torch.profiler.profile() as profiler:
            y = module.forward(host, x)
            torch.cuda.synchronize()
    except Exception as error:
        raise UsageError(told(error, file)) from error
    if not isinstance(y, torch.Tensor) or y.shape != right.shape:
        raise UsageError(f"`forward` should return a tensor of shape {tuple(right.shape)}")
    found = {
        "file": digest(file),
        "device": torch.cuda.get_device_name(),
        "layers": LAYERS,
        "matrix": host[0].nbytes,
        "activation": x.nbytes,
        "peak": torch.cuda.max_memory_allocated() - before,
        "difference": ((y - right).float().norm() / right.float().norm()).item(),
    }
    path = file.with_name("trace.json")
    profiler.export_chrome_trace(str(path))
    trace = json.loads(path.read_text(encoding="utf-8")) | {"lab": found}
    path.write_text(json.dumps(trace), encoding="utf-8")
    return path


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def told(error: Exception, file: Path) -> str:
    """What the student's file raised, and in which of its lines."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    if isinstance(error, NotImplementedError) and frames:
        return f"`{frames[-1].name}` is not written yet (line {frames[-1].lineno})"
    where = f" in line {frames[-1].lineno}: `{frames[-1].line}`" if frames else ""
    return f"{type(error).__name__}{where}: {first_line(error)}"


if __name__ == "__main__":
    sys.exit(main())
