"""`make demo`: train every step on the default corpus, lay the curves on top of each other, print the differences.

Two families of runs. In float32 with the defaults of the command line, layouts must agree to 1e-5 at every step; in
float64, where rounding is out of the way, to 1e-10. Everything goes to runs/demo; the picture is runs/demo/curves.png.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from common.record import compare

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs" / "demo"

# (name, script, ranks, flags); the first of a family is what the others are compared with
RUNS = [
    ("step01", "step01_single_gpu", 1, ""),
    ("step02-naive", "step02_data_parallel", 2, "--dp-mode naive"),
    ("step02-overlap", "step02_data_parallel", 2, "--dp-mode overlap"),
    ("step02-bucket", "step02_data_parallel", 2, "--dp-mode bucket --bucket-mb 1"),
    ("step02-bucket-4-ranks", "step02_data_parallel", 4, "--dp-mode bucket --bucket-mb 1"),
    ("step03-zero-1", "step03_zero", 2, "--zero 1 --bucket-mb 1"),
    ("step03-zero-2", "step03_zero", 2, "--zero 2 --bucket-mb 1"),
    ("step03-zero-3", "step03_zero", 2, "--zero 3"),
    ("step03-zero-3-4-ranks", "step03_zero", 4, "--zero 3"),
    ("step04-tp2", "step04_tensor_parallel", 2, "--tp 2"),
    ("step04-dp2-tp2", "step04_tensor_parallel", 4, "--dp 2 --tp 2"),
    ("step05-pp2", "step05_pipeline", 2, "--pp 2"),
    ("step05-dp2-pp2-tp2", "step05_pipeline", 8, "--dp 2 --pp 2 --tp 2"),
]
FAMILIES = [("float32", "--steps 50", 1e-5), ("float64", "--steps 10 --dtype float64", 1e-10)]


def command(script: str, ranks: int, flags: str, folder: Path) -> list[str]:
    """The command line of one run, as a reader could type it."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [*launcher, f"{script}/train.py", *flags.split(), "--run-dir", str(folder.relative_to(ROOT))]


def main() -> int:
    """Run everything; the exit status is that of the comparisons (1: a difference above the tolerance)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run only families whose name holds this (float32, float64)")
    arguments = parser.parse_args()
    status, began = 0, time.monotonic()
    for family, family_flags, tolerance in FAMILIES:
        if arguments.only not in family:
            continue
        folders = []
        for name, script, ranks, flags in RUNS:
            folder = FOLDER / family / name
            line = command(script, ranks, f"{family_flags} {flags}".strip(), folder)
            print("$ " + " ".join(["python", *line[1:]]), flush=True)
            # one thread a rank: two ranks share the cores that one process has to itself
            threads = {} if ranks == 1 else {"OMP_NUM_THREADS": "1"}
            subprocess.run(line, cwd=ROOT, env=os.environ | threads, check=True)
            folders.append(str(folder))
        print(f"\n== {family}: every run against {RUNS[0][0]}, tolerance {tolerance}\n", flush=True)
        picture = FOLDER / ("curves.png" if family == FAMILIES[0][0] else f"curves-{family}.png")
        status |= compare.main([*folders, "--tolerance", str(tolerance), "--out", str(picture)])
        print(flush=True)
    print(f"{time.monotonic() - began:.0f} s; the curves are in {FOLDER.relative_to(ROOT)}/curves.png")
    return status


if __name__ == "__main__":
    sys.exit(main())
