"""The kernels compile, also where there is no GPU to run them."""

import os
import subprocess
import sys

import pytest

from tests.mechanisms.step08.kernels.compare import needs_triton


@needs_triton
@pytest.mark.skipif(not os.environ.get("TEST_ALL"), reason="compiles for some time: with TEST_ALL=1")
def test_compiles(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.mechanisms.step08.kernels.compiling"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = done.stdout.splitlines()
    assert len(kernels) == 4 * 16 + 4 * 3 + 2 + 2 * 4 + 2 + 10
    on_tensor_cores = [line for line in kernels if line.endswith("wgmma") and not line.startswith("_tiled")]
    assert len(on_tensor_cores) == 2 * (3 + 2) + 4 * 3  # attention and experts in 16 bits
