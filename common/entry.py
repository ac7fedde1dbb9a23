"""What our own programs do before they load PyTorch: `import common.entry` is the first import of each of them.

Nothing else changes the process in which it is imported, so a mechanism can be used in any program.
"""

import os
import sys
from pathlib import Path

import common

# One thread for each process, as torchrun has it: on busy cores, several threads that spin while they wait for each
# other take ten times as long, and their number decides in which order a sum is added up, so the last digits depend on
# it. PyTorch reads this when it is loaded. The user's own value wins.
os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch 2.13 prints two lines whenever its profiler runs

# A script in a copy of this project is to use the modules of the copy, even if the project is installed from elsewhere
_above = Path(getattr(sys.modules["__main__"], "__file__", None) or __file__).resolve().parents
_roots = [root for root in _above if (root / "common" / "process_groups.py").exists()]
if _roots and Path(sys.prefix).resolve() not in _above:  # no script of the environment, such as pytest
    common.__path__[:] = [str(_roots[0] / "common")]
    sys.path.insert(0, str(_roots[0]))
