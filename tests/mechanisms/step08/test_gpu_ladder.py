"""The GPU ladder: every rung computes the same, and what is counted equals the formulas of the lesson."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from step08_5d.gpu_ladder import (
    attention,
    attention_versions,
    contention,
    divergence,
    elu,
    elu_over_n,
    formats,
    four_bits,
    fusion,
    generated,
    machine,
    matmul,
    roofline,
    traffic,
    transactions,
)
from step08_5d.gpu_ladder.four_bits import RECIPES
from step08_5d.gpu_ladder.transactions import ProductShape
from step08_5d.kernels.launching import HAS_TRITON

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton (pip install triton)")
interprets = pytest.mark.skipif(not HAS_TRITON or machine.DEVICE.type == "cuda", reason="needs Triton's interpreter")
SIZES = ProductShape(32, 64, 32)
LADDER = Path(machine.__file__).parent


def random(*shape: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(machine.DEVICE, dtype)


def assert_equal(ours: torch.Tensor, exact: torch.Tensor, tolerance: float = 1e-6) -> None:
    assert ours.shape == exact.shape
    assert machine.difference(ours, exact) < tolerance


@pytest.mark.parametrize("variant", [elu.eager, pytest.param(elu.in_triton, marks=needs_triton)])
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float32, 1e-6), (torch.float16, 6e-4), (torch.bfloat16, 8e-3), (torch.float64, 1e-14)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:overflow")  # of exp(100), which nobody selects
def test_elu(variant, dtype, tolerance):
    x = torch.cat([random(2500), torch.tensor([0.0, 100.0, -100.0], device=machine.DEVICE)]).to(dtype)
    for alpha in (1.0, 0.3):
        assert_equal(variant(x, alpha), F.elu(x.double(), alpha), tolerance)


@needs_triton
@pytest.mark.parametrize("kernel", matmul.IN_TRITON)
@pytest.mark.parametrize("shape", [(33, 7, 5), (3, 40, 5), (2, 3, 35), (1, 1, 1)])
def test_matmul_of_any_shape(kernel, shape):
    m, n, k = shape
    a, b = random(m, k), random(k, n, seed=1)
    assert_equal(matmul.IN_TRITON[kernel](a, b), a.double() @ b.double())


@needs_triton
def test_tiled_matmul_in_16_bits():
    a, b = random(40, 70, dtype=torch.float16), random(70, 33, dtype=torch.float16, seed=1)
    assert_equal(matmul.tiled(a, b, tile=16, depth=32), a.double() @ b.double(), 1e-3)


@pytest.mark.parametrize("variant", [fusion.eager, pytest.param(fusion.in_triton, marks=needs_triton)])
@pytest.mark.parametrize("columns", [1, 5, 128, 130])
def test_softmax(variant, columns):
    x = 50 * random(7, columns)  # exp(x) without the maximum would overflow
    assert_equal(variant(x), F.softmax(x.double(), -1))


@pytest.mark.gpu
def test_compiled():
    for chain, x in ((elu.eager, random(999)), (fusion.eager, random(7, 130))):
        assert_equal(torch.compile(chain)(x), chain(x.double()))
    if machine.cuda_kernels() is None:
        pytest.skip("no nvcc that works")
    x, a, b = random(1000), random(50, 70), random(70, 33, seed=1)
    assert_equal(machine.from_source("elu")(x, 0.3), F.elu(x.double(), 0.3))
    for kernel in transactions.KERNELS:
        assert_equal(machine.from_source(kernel)(a, b), a.double() @ b.double())


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """matmul.cu as a library for the CPU, where a C++ compiler is at hand."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("matmul")
    calls = [
        f"""
        extern "C" long long run_{name}(int gx, int gy, const float* a, const float* b, float* c, int M, int N, int K,
                                        long long* addresses) {{
          return run({name}, {{gx, gy}}, {{TILE, TILE}}, a, b, c, M, N, K, addresses);
        }}"""
        for name in transactions.KERNELS
    ]
    includes = [f'#include "{Path(__file__).with_name("cuda_on_cpu.h")}"', f'#include "{LADDER / "matmul.cu"}"']
    source, library = folder / "matmul.cpp", folder / "matmul.so"
    source.write_text("\n".join([*includes, *calls]))
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return ctypes.CDLL(library)


def run_on_cpu(library: ctypes.CDLL, kernel: str, size: ProductShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run a kernel of matmul.cu. Returns its result, the product, and the addresses that it reads: (threads, reads)."""
    a, b = (random(*shape, seed=seed).cpu().numpy() for seed, shape in enumerate([(size.M, size.K), (size.K, size.N)]))
    memory = np.zeros(a.size + b.size + 8, np.float32)  # a and b behind each other, from an address that sectors divide
    start = -memory.ctypes.data % traffic.SECTOR // 4
    memory[start : start + a.size], memory[start + a.size : start + a.size + b.size] = a.ravel(), b.ravel()
    c, addresses = np.zeros((size.M, size.N), np.float32), np.zeros(2 * size.M * size.N * size.K, np.int64)
    pointer, first = ctypes.c_void_p, memory.ctypes.data + 4 * start
    down, across = -(-size.M // transactions.TILE), -(-size.N // transactions.TILE)
    grid = (down, across) if kernel == "naive" else (across, down)
    run = getattr(library, f"run_{kernel}")
    run.restype = ctypes.c_longlong
    data = pointer(first), pointer(first + a.nbytes), pointer(c.ctypes.data)
    length = run(*grid, *data, size.M, size.N, size.K, pointer(addresses.ctypes.data))
    return c, a @ b, addresses[:length]


@pytest.mark.parametrize("kernel", transactions.KERNELS)
def test_cuda_source_computes_the_product(on_cpu, kernel):
    result, product, _ = run_on_cpu(on_cpu, kernel, ProductShape(34, 33, 70))
    np.testing.assert_allclose(result, product, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", transactions.KERNELS)
def test_cuda_source_reads_the_sectors_that_we_count(on_cpu, kernel):
    """And so does the simulation, in other sizes too."""
    for size in (SIZES, ProductShape(64, 32, 64)):
        predicted = transactions.predicted_loads(kernel, size), transactions.predicted_sectors(kernel, size)
        assert transactions.count(kernel, size) == predicted
    *_, addresses = run_on_cpu(on_cpu, kernel, SIZES)
    by_thread = addresses.reshape(SIZES.M * SIZES.N // traffic.LANES, traffic.LANES, -1)
    found = sum(traffic.sectors(lanes) for warp in by_thread for lanes in warp.T)
    stored = SIZES.M * SIZES.N // traffic.LANES * (32 if kernel == "naive" else 4)
    assert addresses.size == transactions.predicted_loads(kernel, SIZES)
    assert found + stored == transactions.predicted_sectors(kernel, SIZES)


@pytest.mark.parametrize("kernel", transactions.KERNELS)
def test_excess_sectors_are_as_predicted(kernel):
    assert transactions.excess(kernel, SIZES) == transactions.predicted_excess(kernel, SIZES)


def test_the_playbooks_profiler_counted_what_we_count():
    counted = transactions.predicted_sectors("naive", matmul.FULL), transactions.predicted_excess("naive", matmul.FULL)
    assert counted == (matmul.PUBLISHED_SECTORS, matmul.PUBLISHED_EXCESS)


@interprets
@pytest.mark.parametrize("kernel", transactions.KERNELS)
def test_triton_kernels_touch_the_same_sectors(kernel):
    k = 32 if kernel == "tiled" else 8  # a sector of each row at least
    with traffic.kernel_traffic() as touched:
        matmul.IN_TRITON[kernel](torch.zeros(32, k), torch.zeros(k, 32))
    assert touched.sectors == transactions.predicted_sectors(kernel, ProductShape(32, 32, k))


def test_bytes_of_eager_chains():
    x = random(16, 100).cpu()
    for chain, predicted in (
        (elu.eager, elu.EAGER * x.numel()),
        (fusion.eager, fusion.eager_bytes(*x.shape)),
        (fusion.gelu, fusion.GELU * x.numel()),
    ):
        with traffic.BytesMoved() as counted:
            chain(x)
        assert counted.total == predicted
    assert_equal(fusion.gelu(x), F.gelu(x.double(), approximate="tanh"))


@interprets
@pytest.mark.parametrize("kernel", [elu.in_triton, fusion.in_triton])
def test_a_fused_kernel_reads_and_writes_once(kernel):
    x = random(3, 100)
    with traffic.kernel_traffic() as touched:
        kernel(x)
    assert (touched.numbers, touched.bytes) == (2 * x.numel(), 8 * x.numel())


def test_attention():
    q, k, v = (random(1, 2, 40, 16, dtype=torch.float64, seed=seed) for seed in range(3))
    assert_equal(attention.naive(q, k, v), attention.flash(q, k, v), 1e-14)
    for tokens in (128, 256):
        assert attention.peak_bytes(attention.naive, tokens) == pytest.approx(attention.naive_peak(tokens), abs=64)
        assert 1 <= attention.peak_bytes(attention.flash, tokens) / attention.flash_peak(tokens) < 1.3
        q, k, v = (torch.empty(1, attention.HEADS, tokens, attention.WIDTH, device="meta") for _ in range(3))
        with traffic.BytesMoved() as counted:
            attention.naive(q, k, v)
        assert counted.total == attention.naive_moved(tokens)


def test_flash_attentions():
    ask = attention_versions.bytes_asked
    assert ask("FlashAttention-1", 128, 64) - ask("FlashAttention-2", 128, 64) == 2 * 4 * 128 - 4 * 128, "one block"
    assert ask("FlashAttention-1", 16384, 128) / ask("FlashAttention-2", 16384, 128) == pytest.approx(1.52, abs=0.01)
    for gpu in attention_versions.RATES:
        shares = [attention_versions.share_of_peak(name, 128, gpu) for name in attention_versions.VERSIONS]
        assert shares == sorted(shares) and shares[-1] == 1
    all_scores, half = (attention_versions.gpt2_speedup(masked) for masked in (False, True))
    # (8·2·s² + s² + 4·2·s·d) / 1.5e12 against 4 s² d / (0.4235·312e12), s 1024, d 64; and twice that
    share = 4 * 64 / 2048 / (4 * 64 / 2048 + 1 / 16 + (5 + 4 * 64 / 128) / 64)
    assert all_scores == pytest.approx((17 + 8 * 64 / 1024) / 1.5 / (4 * 64 / (share * 312)))
    assert half == 2 * all_scores and all_scores < 7.6 < half  # published


@pytest.mark.parametrize("tokens, window, length", [(512, 256, 512), (768, 128, 384), (512, 512, 256)])
def test_a_mask_as_a_matrix_and_as_a_function(tokens, window, length):
    sees = attention_versions.window_of_documents(attention_versions.documents_of(tokens, length), window)
    blocks = attention_versions.blocks_of(sees, tokens, machine.DEVICE.type)
    q, k, v = (random(1, 1, tokens, 16, dtype=torch.float64, seed=seed) for seed in range(3))
    ours = attention_versions.by_function(q, k, v, blocks)
    assert_equal(ours, attention_versions.by_matrix(q, k, v, sees), 1e-14)
    found = blocks.kv_num_blocks.sum() + blocks.full_kv_num_blocks.sum()
    assert found == attention_versions.predicted_blocks(tokens, window, length)
    assert [attention_versions.predicted_blocks(8192, 1024, each) for each in (4096, 512)] == [504, 160]  # the page's


def test_two_numbers_describe_the_published_curve():
    bandwidth, fixed = elu_over_n.fit({n: speeds[2] for n, speeds in elu_over_n.PUBLISHED.items()})
    for n, (*_, published) in elu_over_n.PUBLISHED.items():
        assert elu_over_n.predicted(n, bandwidth, fixed) == pytest.approx(published, rel=0.006)


@interprets
def test_the_compilers_kernel_moves_as_much_as_ours():
    x = random(1300)
    with traffic.kernel_traffic() as touched:
        assert_equal(generated.run_elu(x), F.elu(x.double(), elu.ALPHA))
    assert touched.bytes == elu.LEAST * x.numel()
    assert len(generated.kernels_of(generated.compilers_code(fusion.eager, x.view(13, 100)))) == 1


@pytest.mark.parametrize("case", divergence.cases(4096), ids=lambda case: case.name)
def test_branches_of_a_warp(case):
    assert divergence.paths(case.choices) == pytest.approx(case.predicted, rel=0.01)


@needs_triton
def test_a_product_beside_a_collective():
    assert [contention.slowdown(4096, taken) for taken in (0, 4, 5, 32)] == [1, 1, 5 / 4, 6 / 4]
    source, target = random(3, 64), torch.zeros(3, 64, device=machine.DEVICE)
    contention.copy_on(source, target, 2)
    assert torch.equal(source, target)


def test_roofline_has_a_ridge():
    ridge = roofline.peak_flops("H100") / roofline.MEMORY_BANDWIDTH["H100"]
    below, above = (roofline.Operation("", factor * ridge, 1) for factor in (0.5, 2))
    shares = [roofline.reachable(each, "H100") / roofline.peak_flops("H100") for each in (below, above)]
    assert shares == pytest.approx([0.5, 1])
    assert roofline.product(2, 3, 4, itemsize=1) == (48, 20 + 12)  # 8 + 12 numbers in, 6 of two bytes out
    for gpu in roofline.MEMORY_BANDWIDTH:
        assert roofline.peak_flops(gpu, "float8") / roofline.peak_flops(gpu) == pytest.approx(2, abs=0.002)
        assert roofline.reachable(roofline.IN_FP8[1], gpu, "float8") == roofline.peak_flops(gpu, "float8")
    gain = roofline.reachable(roofline.IN_FP8[0], "H100", "float8") / roofline.peak_flops("H100")
    assert gain == pytest.approx(2 * 256 * 4096 / (2 * 256 + 4096 + 256) * 3.35 / 989)  # 2mnk/(mk + kn + 2mn) TB/s


def test_what_the_profiler_says_of_caches_and_queues():
    """33 sectors instead of 5, and as many misses: 1 - 0.009·33/5. Two loads, each a cycle: an eighth of 67 TFLOP/s."""
    assert matmul.hit_rate("naive") == matmul.PUBLISHED_HITS["naive"]
    assert matmul.hit_rate("coalesced") == pytest.approx(1 - 0.009 * 33 / 5, abs=1e-4)
    assert matmul.hit_rate("coalesced") == pytest.approx(matmul.PUBLISHED_HITS["coalesced"], abs=0.01)
    assert matmul.tiled_limit(67) == 67 / 8 > matmul.PUBLISHED_TILED > 0.75 * 67 / 8


@pytest.mark.parametrize("name", formats.FORMATS)
def test_bits_and_numbers_of_formats(name):
    """Those of 8 bits one by one."""
    dtype, exponent, mantissa = formats.FORMATS[name]
    info = torch.finfo(dtype)
    assert info.bits == 1 + exponent + mantissa
    assert info.eps == 2.0**-mantissa and formats.between_one_and_two(dtype) == 2**mantissa - 1
    assert formats.spacing(dtype, 1.0) == info.eps
    if info.bits == 8:
        numbers = formats.all_numbers(dtype)
        assert ((numbers > 1) & (numbers < 2)).sum() == {"e4m3": 7, "e5m2": 3}[name]
        assert numbers.max() == info.max == {"e4m3": 448, "e5m2": 57344}[name]
        assert numbers[numbers > 0].min() == formats.spacing(dtype, 0.0)


def test_four_bits():
    between = torch.tensor([0.25, 0.75, -1.25, 1.75, 2.5, 3.5, -5.0, 7.0, 0.26, 5.1])  # ties go to an even mantissa
    assert four_bits.to_e2m1(between).tolist() == [0, 1, -1, 2, 2, 4, -4, 6, 0.5, 6]
    chance = four_bits.to_e2m1(torch.full((10_000,), 0.1), torch.Generator().manual_seed(0))
    assert chance.unique().tolist() == [0, 0.5] and chance.mean().item() == pytest.approx(0.1, abs=0.01)
    x, ordinary = four_bits.numbers(100, rows=256)
    assert_equal(four_bits.rotated(four_bits.rotated(x, four_bits.hadamard()), four_bits.hadamard().T), x, 1e-14)
    found = {name: four_bits.noise_and_loss(recipe(x)[ordinary], x[ordinary]) for name, recipe in RECIPES.items()}
    assert found["NVFP4"][1] > 0.08 > 0.01 > found["NVFP4, stochastic"][1]
    assert found["NVFP4"][0] < found["NVFP4, stochastic"][0], "what chance does not lose, it adds as noise"
