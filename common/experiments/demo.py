"""`make demo`: train every step on the default corpus, draw all curves into one picture and print the differences.

Four families of runs. In float32, with the defaults of the command line, every layout must agree with step 1 to 1e-5
at every step; in float64, which leaves hardly any rounding, to 1e-10. Models with experts must agree with one process
that holds all experts, to 1e-10. In bfloat16, step 8 must stay within 1e-2 of the float32 runs, about three times what
rounding to 8 bits does to the gradient norm. Everything is written to runs/demo, the picture to runs/demo/curves.png.
`make demo-all` trains more layouts of each step. If there are fewer GPUs than ranks, all runs use the CPU, so that the
same hardware computes them.
"""

import subprocess
import sys
import time
from pathlib import Path

import common.entry  # noqa: F401

# isort: split
import torch

from common import compare
from common.errors import UsageError
from common.launching.command_line import OneLineParser, one_line_errors, summary

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "runs" / "demo"

# (name, script, ranks, flags); all of a family are compared with the first
RUNS = [
    ("step01", "step01_single_gpu", 1, ""),
    ("step02", "step02_data_parallel", 2, "--bucket-mb 1"),
    ("step03-zero-3", "step03_zero", 2, "--zero 3"),
    ("step04-tp2", "step04_tensor_parallel", 2, "--tp 2"),
    ("step05-pp2", "step05_pipeline", 2, "--pp 2"),
    ("step06-cp2", "step06_context_parallel", 2, "--cp 2"),
]
STEP_8 = [("step08-pp2-cp2-tp2", "step08_5d", 8, "--pp 2 --cp 2 --tp 2")]
BFLOAT16 = [("step08-bfloat16", "step08_5d", 8, "--pp 2 --cp 2 --tp 2 --dtype bfloat16")]
MORE_RUNS = [
    ("step02-naive", "step02_data_parallel", 2, "--dp-mode naive"),
    ("step02-overlap", "step02_data_parallel", 2, "--dp-mode overlap"),
    ("step02-4-ranks", "step02_data_parallel", 4, "--bucket-mb 1"),
    ("step03-zero-1", "step03_zero", 2, "--zero 1 --bucket-mb 1"),
    ("step03-zero-2", "step03_zero", 2, "--zero 2 --bucket-mb 1"),
    ("step03-zero-3-4-ranks", "step03_zero", 4, "--zero 3"),
    ("step04-dp2-tp2", "step04_tensor_parallel", 4, "--dp 2 --tp 2"),
    ("step05-dp2-pp2-tp2", "step05_pipeline", 8, "--dp 2 --pp 2 --tp 2"),
]
EXPERTS = [
    ("step07", "step07_expert_parallel", 1, ""),
    ("step07-ep4-tp2", "step07_expert_parallel", 4, "--ep 4 --tp 2"),
    ("step08-pp2-cp2-tp2-ep4", "step08_5d", 8, "--pp 2 --cp 2 --tp 2 --ep 4"),
]
FLOAT64 = "--steps 5 --dtype float64"
MOE = f"{FLOAT64} --experts 8 --expert-ffn 128 --shared-experts 1 --balance bias"
FAMILIES = [  # (name, flags, tolerance, runs); step 8 starts 8 ranks, so that float64 leaves it to the experts
    ("float32", "--steps 20", 1e-5, RUNS + STEP_8),
    ("float64", FLOAT64, 1e-10, RUNS),
    ("experts", MOE, 1e-10, EXPERTS),
    ("bfloat16", "--steps 10", 1e-2, BFLOAT16),
]
ALSO_COMPARED = {"bfloat16": [FOLDER / "float32" / name for name in ("step01", "step08-pp2-cp2-tp2")]}


def device_flag(gpus: int, ranks: int) -> str:
    """Return the flag with which all runs use the CPU, if there are some GPUs but not one for each rank."""
    return "--device cpu" if 0 < gpus < ranks else ""


def train(script: str, ranks: int, flags: str, folder: Path) -> None:
    """Run one training with the command line that a reader could type, and print it first."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    words = [*launcher, f"{script}/train.py", *flags.split(), "--run-dir", str(folder.relative_to(ROOT))]
    print("$ " + " ".join(["python", *words]), flush=True)
    if status := subprocess.run([sys.executable, *words], cwd=ROOT).returncode:
        raise UsageError(f"this run ended with status {status}")


@one_line_errors
def main() -> int:
    """Run everything; the exit status is that of the comparisons (1: a difference above the tolerance)."""
    parser = OneLineParser(description=summary(__doc__))
    parser.add_argument("--all", action="store_true", help="train more layouts of each step")
    everything = parser.parse_args().all
    status, began = 0, time.monotonic()
    for family, family_flags, tolerance, runs in FAMILIES:
        runs = sorted(RUNS + STEP_8 + MORE_RUNS) if everything and RUNS[0] in runs else runs
        device = device_flag(torch.cuda.device_count(), max(ranks for _, _, ranks, _ in runs))
        folders = [FOLDER / family / name for name, *_ in runs]
        for folder, (_, script, ranks, flags) in zip(folders, runs):
            train(script, ranks, f"{family_flags} {device} {flags}", folder)
        folders = ALSO_COMPARED.get(family, []) + folders
        print(f"\n== {family}: every run against {folders[0].name}, tolerance {tolerance}\n", flush=True)
        picture = FOLDER / ("curves.png" if family == FAMILIES[0][0] else f"curves-{family}.png")
        status |= compare.main([*map(str, folders), "--tolerance", str(tolerance), "--out", str(picture)])
        print(flush=True)
    print(f"{time.monotonic() - began:.0f} s; the curves are in {FOLDER.relative_to(ROOT)}/curves.png")
    return status


if __name__ == "__main__":
    sys.exit(main())
