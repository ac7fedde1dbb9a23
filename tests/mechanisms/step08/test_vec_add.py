"""The whole program of vec_add.cu, its host code too, on a CPU: its launch becomes two loops."""

import re
import shutil
import subprocess

import pytest

from tests.harness.ranks import ROOT

STAND_INS = r"""
#include <cstring>
#define __global__
struct Index { size_t x; } static threadIdx, blockIdx, blockDim;
using cudaError_t = int;
enum { cudaSuccess, cudaErrorMemoryAllocation, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
static const char* cudaGetErrorString(int) { return "out of memory"; }
static int cudaMalloc(float** to, size_t bytes) {  // of a small GPU
  return bytes > 4000 ? cudaErrorMemoryAllocation : (*to = (float*)malloc(bytes), cudaSuccess);
}
static int cudaMemcpy(void* to, const void* from, size_t bytes, int) { return memcpy(to, from, bytes), cudaSuccess; }
static int cudaFree(void* memory) { return free(memory), cudaSuccess; }
static int cudaGetLastError() { return cudaSuccess; }
"""
LOOPS = """blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < (size_t)blocks; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < (size_t)threads; threadIdx.x++) add_kernel("""


@pytest.mark.parametrize("n, status, said", [(1000, 0, "1000 sums, 0 of them wrong\n"), (1001, 1, "out of memory\n")])
def test_vec_add(tmp_path, n, status, said):
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("no g++")
    source, program = (ROOT / "step08_5d" / "gpu_ladder" / "vec_add.cu").read_text(), tmp_path / "vec_add"
    includes, code = source.split("// Runs on the GPU", 1)
    code, launches = re.subn(r"add_kernel<<<blocks, threads>>>\(", LOOPS, code)
    assert launches == 1
    (tmp_path / "vec_add.cpp").write_text(f"{includes}{STAND_INS}//{code}")
    subprocess.run([compiler, tmp_path / "vec_add.cpp", "-o", program], check=True, capture_output=True)
    done = subprocess.run([program, str(n)], capture_output=True, text=True)
    assert (done.returncode, (done.stdout + done.stderr).removeprefix("vec_add: ")) == (status, said)
