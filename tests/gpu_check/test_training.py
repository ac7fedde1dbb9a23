"""The same training on several ranks as in one process, in float64 and bfloat16; many short runs."""

import math
from concurrent.futures import ThreadPoolExecutor

from common.record.compare import relative_difference
from tests.gpu_check.findings import Findings, on_devices
from tests.gpu_check.launching import need_ranks, run_on_ranks, train_alone
from tests.gpu_check.layouts import BAND, LAYOUTS, REFERENCES, SMALL, TIMEOUT, TOLERANCE, groups
from tests.harness.ranks import steps_of

EXACT = groups(*(i for i, each in enumerate(LAYOUTS) if each.ranks <= 4 and each.bound == TOLERANCE))
NARROW = groups(*(i for i, each in enumerate(LAYOUTS) if each.bound == BAND))
MANY = [i for i, each in enumerate(LAYOUTS) if each.ranks > 4]
SHARED = groups(0, 3, 7, 9, 12, 14, 17, *MANY)  # those of more than 4 ranks run through gloo only


def difference(found: Findings, run: str, expected: str) -> float:
    """Return the largest relative difference of any step's loss or gradient norm."""
    ours, theirs = (steps_of(found.folder / each) for each in (run, expected))
    if len(ours) != len(theirs):
        return math.inf
    return max(relative_difference(b[key], a[key]) for a, b in zip(ours, theirs) for key in ("loss", "grad_norm"))


def check_layouts(found: Findings, indices: list[int], backend: str, together: bool = False) -> None:
    """Train these layouts on ranks that talk through `backend`, and compare each with one rank on the same device."""
    backend, ranks = "gloo" if found.device.type == "cpu" else backend, LAYOUTS[indices[0]].ranks
    for name in {LAYOUTS[index].reference for index in indices}:
        train_alone(found, name, *REFERENCES[name])
    command = ["-m", "tests.gpu_check.layouts", found.folder, found.device.type, backend, *indices]
    run_on_ranks(found, f"layouts-{indices[0]}", command, ranks, TIMEOUT + (10 + 2 * ranks) * len(indices), together)
    wrong = {}
    for layout, run in ((LAYOUTS[index], str(index)) for index in indices if LAYOUTS[index].step):
        worst = difference(found, run, layout.reference)
        found.note(f"largest difference, {layout} through {backend}", f"{worst:.1e}")
        if not worst < layout.bound:
            wrong[str(layout)] = worst
    assert not wrong


@on_devices(EXACT, quick=["2 ranks, step 0", "2 ranks, step 3"])
def test_nccl(found, item):
    need_ranks(found)
    check_layouts(found, EXACT[item], "nccl")


@on_devices(NARROW, quick=["2 ranks, step 8"])
def test_bfloat16(found, item):
    """Step 8's kernels, beside one rank in float64."""
    need_ranks(found)
    check_layouts(found, NARROW[item], "nccl")


@on_devices(SHARED)
def test_shared_gpu(found, item):
    """As more ranks than GPUs do: through gloo, in five dimensions."""
    check_layouts(found, SHARED[item], "gloo", together=True)


@on_devices([""], quick=[""])
def test_starts(found, item):
    """Short runs on two ranks, all of which must end with status 0."""
    need_ranks(found)
    runs, at_once = (1, 1) if found.quick else (30, 5)
    flags = f"{SMALL} --steps 3 --timeout {TIMEOUT} --device {found.device.type}".split()

    def start(index: int) -> None:
        run_on_ranks(found, f"run-{index}", ["step02_data_parallel/train.py", *flags], 2, 2 * TIMEOUT)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(start, range(runs)))  # raises the first error
