"""One rank of a run in lockstep: `python common/lockstep/rank.py FOLDER KIND STEPS step0N_name/train.py FLAGS`.

It does what the script does, in float64 and for a few steps, and leaves in FOLDER what it has seen. `common.lockstep`
starts it in the place of the script.
"""

import common.entry  # noqa: F401 (before torch: one thread per process by default)

# isort: split
import importlib
import pickle
import sys
from pathlib import Path

from common.launching.command_line import STEP_NAMES
from common.launching.launch import run
from common.lockstep.observe import observe, prepare
from common.start import environment


def main(argv: list[str]) -> None:
    folder, kind, steps, script, *flags = argv
    name = Path(script).resolve().parent.name
    sys.argv = [script, *flags]

    def train(config, mesh) -> None:
        seen = observe(importlib.import_module(f"{name}.train"), config, mesh, kind == "reference")
        Path(folder, f"{environment().rank}.{kind}").write_bytes(pickle.dumps(seen))

    def check(config) -> None:
        importlib.import_module(f"{name}.config").check(prepare(config, int(steps)))

    run(STEP_NAMES.index(name) + 1, train, check)


if __name__ == "__main__":
    main(sys.argv[1:])
