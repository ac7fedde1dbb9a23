"""The kernel that torch.compile writes for ELU and for the softmax, and the bytes that it moves.

On a GPU, `TORCH_LOGS=output_code` prints it. On a CPU, torch writes C++ instead. But it can also write Triton there, if
a stand-in names the GPU to write for; and what it has written, Triton's interpreter runs.
"""

import contextlib
import importlib.util
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from common.drawing.tables import print_comparison
from step08_5d.gpu_ladder import elu, fusion
from step08_5d.gpu_ladder.machine import DEVICE, NO_TRITON, difference
from step08_5d.gpu_ladder.traffic import kernel_traffic
from step08_5d.kernels.launching import HAS_TRITON, ceil_div

HEAD = "import triton\nimport triton.language as tl\nfrom torch._inductor.runtime import triton_helpers\n"


class _Written(Exception):
    """Ends the compilation once the code exists: there is no GPU to compile it for."""


def compilers_code(function: Callable, *inputs: torch.Tensor) -> str:
    """The Python module that torch.compile writes for a call, with Triton's kernels in it; without running them."""
    from torch._inductor import config
    from torch._inductor.exc import InductorError
    from torch._inductor.graph import GraphLowering
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    def keep(code: str) -> None:
        written.append(code)
        raise _Written

    written, target = [], GPUTarget("cuda", 90, 32)
    torch._dynamo.reset()
    with (
        config.patch(cpu_backend="triton"),
        mock.patch.object(driver, "_active", SimpleNamespace(get_current_target=lambda: target)),
        mock.patch.object(GraphLowering, "save_output_code", keep),
        contextlib.suppress(InductorError, _Written),
    ):
        torch.compile(function, dynamic=False)(*inputs)
    return written[0]


def kernels_of(code: str) -> list[str]:
    """The source of each kernel, from `def` to its last line."""
    return re.findall(r"^@triton\.jit\n(def .*?)(?=^''')", code, re.MULTILINE | re.DOTALL)


def as_function(kernel: str):
    """A kernel that Triton's interpreter can launch. It knows no libdevice, so exp becomes Triton's own."""
    name = re.match(r"def (\w+)", kernel)[1]
    with tempfile.TemporaryDirectory() as folder:  # Triton reads the source again
        path = Path(folder, f"{name}.py")
        path.write_text(f"{HEAD}\n\n@triton.jit\n{kernel.replace('libdevice.', 'tl.')}", encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)


def run_elu(x: torch.Tensor, block: int = 1024) -> torch.Tensor:
    """ELU by the kernel that torch.compile has written for x, in Triton's interpreter."""
    (kernel,), out = kernels_of(compilers_code(elu.eager, x)), torch.empty_like(x)
    as_function(kernel)[ceil_div(x.numel(), block),](x, out, x.numel(), block)
    return out


def generated(quick: bool) -> None:
    """What torch.compile writes for ELU and softmax, and the bytes that its ELU moves."""
    if not HAS_TRITON:
        print(f"  {NO_TRITON}")
        return
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for function, example in ((elu.eager, x), (fusion.eager, x.view(10, 100))):
        for kernel in kernels_of(compilers_code(function, example)):
            print("\n  " + kernel.strip().replace("\n", "\n  "))
    if DEVICE.type == "cpu":
        with kernel_traffic() as touched:
            out = run_elu(x)
        print(f"\n  the first, interpreted: {difference(out, elu.eager(x.double())):.0e} from exact")
        print_comparison("Bytes read and written per number", "", [("ELU", elu.LEAST, touched.bytes / x.numel())])
