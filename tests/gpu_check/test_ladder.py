"""What the GPU ladder predicts for a GPU: ELU over N, masks, a product beside a collective; and its first program."""

import shutil

import pytest

from step08_5d.gpu_ladder import attention_versions, contention, elu_over_n, machine
from step08_5d.kernels.launching import HAS_TRITON
from tests.gpu_check.findings import on_devices
from tests.harness.ranks import run_command

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is missing")
SIZES = [*elu_over_n.PUBLISHED]


@pytest.fixture(autouse=True)
def called_once(monkeypatch):
    """On a CPU, where nobody asks for times, functions are only tried."""
    if machine.DEVICE.type == "cpu":
        for module in (attention_versions, elu_over_n):
            monkeypatch.setattr(module, "seconds_of", lambda function, *inputs: (function(*inputs), 1.0)[1])


@needs_triton
@on_devices(SIZES, quick=SIZES[:1])
def test_elu_over_n(found, item):
    """Without the time of launches, the compiled kernel should be as fast as Triton's at all sizes."""
    speeds = elu_over_n.measure([item], *([2] if found.quick else []))[item]
    header = ["N", *(f"{name}, {what}" for what in ("here", "published") for name in elu_over_n.NAMES)]
    found.row("ELU, GB/s", header, [str(item), *(f"{each:,.0f}" for each in (*speeds, *elu_over_n.PUBLISHED[item]))])


@on_devices([(8192, 1024, 4096)], quick=[(256, 128, 128)])
def test_masks(found, item):
    """A window in documents: with a matrix, with FlexAttention, and without."""
    for name, seconds in attention_versions.measure(*item).items():
        found.note(f"ms of attention, {item[0]:,} tokens, {name}", f"{1e3 * seconds:.2f}")


@needs_triton
@on_devices(contention.SIZES)
def test_a_product_beside_a_collective(found, item):
    for (size, taken), measured in contention.measure((item,)).items():
        model = [f"{each:.3f}" for each in (contention.slowdown(size, taken), contention.smooth_slowdown(taken))]
        cells = [f"{size:,}", str(taken), f"{measured:.3f}", *model]
        found.row("time of a product / alone", ["size", "multiprocessors taken", "here", "waves", "smooth"], cells)


@on_devices([""])
def test_vec_add(found, item):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    program = found.folder / "vec_add"
    found.folder.mkdir(parents=True, exist_ok=True)
    run_command(["nvcc", "-arch=native", machine.HERE / "vec_add.cu", "-o", program], timeout=200)
    assert "0 of them wrong" in run_command([program, "1000000"], timeout=60).stdout
