"""Whether a run can fit at all: what its ranks hold at least, compared with the memory that is free.

Linux promises more memory than it has. It would let a model that is far too large grow until the system kills it.
"""

import math
import platform
import re
from pathlib import Path

import torch

from common.config import TrainConfig
from common.counts import count_parameters
from common.errors import UsageError
from common.launching.all_ranks import on_all_ranks
from common.launching.run_mesh import degrees_of
from common.process_groups import Mesh
from step01_single_gpu.cost import bytes_per_parameter

SYSTEM = Path("/")  # whose proc and sys describe this machine


def check_memory(config: TrainConfig, mesh: Mesh) -> None:
    """Raises UsageError on all ranks if the run cannot fit. They call it together, before they allocate anything."""
    free: dict[str, int] = {}
    for place, here in on_all_ranks(mesh, lambda: free_memory(mesh.device)):
        free[place] = max(free.get(place, 0), here)  # ranks of one machine, or of one GPU, share it
    if (needed := bytes_needed(config)) > (available := sum(free.values())):
        total, ranks = count_parameters(config.model_config).total, mesh.world.size
        on = f"all {ranks} ranks together" if ranks > 1 else "one process"
        raise UsageError(
            f"--model {config.model} with {total:,} parameters: weights, gradients and optimizer states take at least "
            f"{needed / 1e9:,.1f} GB on {on}, and {available / 1e9:,.1f} GB are free"
        )


def bytes_needed(config: TrainConfig) -> int:
    """Return the bytes of weights, gradients and optimizer states that all ranks of a checked configuration hold.

    It is a lower bound: activations, buffers and copies of single parameters come on top.
    """
    model, degrees = config.model_config, degrees_of(config)
    each = bytes_per_parameter(config.torch_dtype, config.optimizer)
    if config.moments != TrainConfig.moments:  # narrower ones
        each["moments"] = 2 * getattr(torch, config.moments).itemsize
    states = each["master weights"] + each["moments"]
    experts = len(model.expert_layers) * model.experts * 3 * model.hidden * model.expert_ffn
    dense, ranks = count_parameters(model).total - experts, degrees.dp * degrees.cp
    result = 0
    # Of each kind: how many copies exist, and in how many of them ZeRO divides what it divides
    for parameters, copies, divided in (
        (dense, ranks, degrees.zero_replicas),
        (experts, ranks * degrees.tp // degrees.ep, degrees.expert_replicas),
    ):
        weights, gradients = (divided if config.zero >= stage else copies for stage in (3, 2))
        result += parameters * (weights * each["parameters"] + gradients * each["gradients"] + divided * states)
    return result


def free_memory(device: torch.device) -> tuple[str, int | float]:
    """Return a name of the memory that a rank on `device` uses, and how many bytes of it are free; or infinity."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return str(torch.cuda.get_device_properties(device).uuid), torch.cuda.mem_get_info(device)[0] + cached
    lines = dict(line.split(":") for line in _read("proc/meminfo").splitlines())
    try:
        free = sum(int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    except KeyError:  # not Linux
        return "", math.inf
    place = platform.node() + _read("proc/sys/kernel/random/boot_id")
    # A container or Slurm may set a limit for this process's control group, or for one around it (version 2 of these)
    own = re.search(r"^0::/(.*)", _read("proc/self/cgroup"), re.MULTILINE)
    group = Path("sys/fs/cgroup", own[1] if own else "")
    for file in (folder / "memory.max" for folder in (group, *group.parents)):
        if (limit := _read(file).strip()).isdecimal() and int(limit) < free:  # others say "max"
            place, free = f"{place} {file}", int(limit)
    return place, free


def _read(path: Path | str) -> str:
    """A file of the system; "" if it does not exist here or must not be read."""
    try:
        return (SYSTEM / path).read_text(encoding="utf-8")
    except OSError:
        return ""
