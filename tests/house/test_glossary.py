"""The glossary: ranks are those of the mesh, containers those of the code, and names exist, here and in PyTorch."""

import importlib
import inspect
import math
import re
from dataclasses import replace
from functools import reduce

import pytest
import torch
from torch import nn

from common.costs.hardware import H100_TFLOPS
from common.costs.networks import BUS_GB_PER_S, NETWORK, NODE, NVLINK
from common.drawing import groups as picture
from common.group import Group
from common.launching.run_mesh import degrees_of
from common.parameter import attach_specs
from common.process_groups import GROUP_NAMES, all_groups, coordinates
from step02_data_parallel.data_parallel import fill_buckets
from step03_zero.unit import Unit
from step03_zero.zero import fill_all_buckets
from tests.harness.observing import configure
from tests.harness.ranks import ROOT

PAGE = (ROOT / "common" / "glossary.md").read_text()
RANK, SIXTEEN = picture.RANK, all_groups(picture.EXAMPLE)


def section(title: str) -> str:
    """The text below a heading."""
    return re.search(rf"^## {re.escape(title)}.*?\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]


def rows(text: str, first: str) -> list[list[str]]:
    """The rows below the header of the table whose first column has this title."""
    table = re.search(rf"^\| {first} \|.*\n\|[-| ]+\n((?:\|.*\n)+)", text, re.MULTILINE)[1]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def of_rank(name: str, groups: dict = SIXTEEN) -> tuple[int, ...]:
    """The group of the glossary's rank."""
    (found,) = [ranks for ranks in groups[name] if RANK in ranks]
    return found


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_the_example_is_what_its_flags_ask_for():
    (flags,) = re.findall(r"flags for this are `(.*?)`", PAGE)
    assert degrees_of(configure(8, flags, 16)) == picture.EXAMPLE
    assert coordinates(RANK, picture.EXAMPLE) == {"dp": 0, "pp": 1, "cp": 0, "tp": 1}
    assert "So rank 5 is dp 0, pp 1, cp 0, tp 1." in PAGE and RANK == 5
    assert "rank = ((dp_rank · pp + pp_rank) · cp + cp_rank) · tp + tp_rank\n" in PAGE
    for rank in range(picture.EXAMPLE.world):
        dp, pp, cp, tp = (coordinates(rank, picture.EXAMPLE)[axis] for axis in ("dp", "pp", "cp", "tp"))
        assert ((dp * 2 + pp) * 2 + cp) * 2 + tp == rank


def test_the_table_of_groups():
    named = {name: numbers(ranks) for name, ranks, *_ in rows(section("Groups"), "group")}
    expected = {title: of_rank(name) for name, title, *_ in picture.PANELS}
    assert {f"`{title}`": ranks for title, ranks in expected.items()} == named
    further = rows(section("Groups"), "further group")
    listed = {name: ranks for names, ranks, _ in further for name in re.findall(r"`(\w+)`", names)}
    assert listed.pop("world") == f"all {picture.EXAMPLE.world}"
    assert {name: of_rank(name) for name in listed} == {name: numbers(ranks) for name, ranks in listed.items()}


def test_the_ranks_in_the_text():
    text = re.sub(r"\s+", " ", section("Groups"))
    one_copy = all_groups(replace(picture.EXAMPLE, zero_replicas=1))
    assert of_rank("shard", one_copy) == (5, 7, 13, 15) and of_rank("replica", one_copy) == (RANK,)
    assert "Then `shard` is all of `dp_cp`, here 5 7 13 15, and `replica` is rank 5 alone." in text
    nothing = all_groups(degrees_of(configure(8, "--tp 2 --cp 2 --pp 2", 16)))  # stage 0
    assert of_rank("shard", nothing) == (RANK,) and of_rank("replica", nothing) == (5, 7, 13, 15)
    assert "With `--zero 0`, which shards nothing, `shard` is rank 5 alone, and `replica` is 5 7 13 15." in text
    assert of_rank("dp") == of_rank("replica") == of_rank("edp") == (5, 13)


@pytest.mark.parametrize(("across", "down"), [("shard", "replica"), ("ep", "edp")])
def test_ranks_as_a_table(across, down):
    """Rows are groups of one name, columns those of the other, and rank 5 is among them."""
    (block,) = re.findall(rf"^```text\n +{across}\n{down} (.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    drawn = [numbers(line) for line in block.splitlines()]
    assert RANK in drawn[0]
    assert set(drawn) <= set(SIXTEEN[across]) and set(zip(*drawn, strict=True)) <= set(SIXTEEN[down])


def test_every_group_of_the_mesh_is_named():
    named = set(re.findall(r"`(\w+)`", section("Groups")))
    assert set(GROUP_NAMES) <= named
    assert {name for name, *_ in picture.PANELS} <= set(GROUP_NAMES)


def test_the_picture(tmp_path):
    """In it each of the 16 ranks has one place, and one letter, in every panel."""
    for name, *_ in picture.PANELS:
        assert sorted(rank for ranks in SIXTEEN[name] for rank in ranks) == list(range(16))
        assert len(SIXTEEN[name]) <= len("abcdefgh")
    assert picture.draw(tmp_path / "groups.png").stat().st_size > 10_000


# ---- containers ------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """As in the picture: a norm, then two matrices."""

    def __init__(self):
        super().__init__()
        self.n, self.U, self.D = (nn.Parameter(torch.zeros(size)) for size in (2, 4, 4))


def parts_of(pieces: list[tuple[int, str]]) -> str:
    """A row of the picture: three characters for a number."""
    cells = [f" {name} ".center(3 * size - 1, "-") for size, name in pieces]
    return "|".join(["", *cells, ""])


def test_containers():
    model = nn.ModuleDict({"1": Layer(), "2": Layer()})
    attach_specs(model)
    parameters, limit = list(model.parameters()), 8 * 4 / 1e6  # 8 numbers of 4 bytes
    names = {each: "".join(reversed(each.spec.name.split("."))) for each in parameters}  # D2
    buckets = fill_buckets(parameters, "bucket", limit)
    assert buckets == fill_all_buckets(parameters, "bucket", limit)  # as stages 1 and 2 ask for them
    regions = [fill_all_buckets(list(model[name].parameters()), "bucket", math.inf)[0] for name in "21"]
    order = [names[each] for bucket in buckets for each in bucket for _ in range(each.numel())]
    assert order == [names[each] for region in regions for each in region for _ in range(each.numel())]

    def sizes(units: list[list[nn.Parameter]]) -> list[int]:
        return [sum(each.numel() for each in unit) for unit in units]

    def shards(units: list[list[nn.Parameter]]) -> str:
        """Of two ranks."""
        found = []
        for unit in units:
            for rank in range(2):
                group = Group("shard", (0, 1), rank)
                found.append((Unit(unit, 1, group, Group("replica", (rank,), 0)).shard.numel(), f"rank {rank}"))
        return parts_of(found)

    layers = list(zip(sizes(regions), ("layer 2", "layer 1")))
    (drawn,) = re.findall(r"^```text\n(gradient of.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    expected = [
        ("gradient of", " " + " ".join(order)),
        ("region", parts_of(layers)),
        ("bucket = unit of stages 1, 2", parts_of([(size, str(number)) for number, size in enumerate(sizes(buckets))])),
        ("  its shards", shards(buckets)),
        ("unit of stage 3", parts_of(layers)),
        ("  its shards", shards(regions)),
    ]
    assert drawn.splitlines() == [f"{label:30}{row}" for label, row in expected]

    assert [names[each] for each in buckets[1]] == ["n2", "D1"]  # a norm of one layer and a matrix of another
    pieces = Unit(regions[0], 3, Group("shard", (0, 1), 0), Group("replica", (0,), 0)).pieces
    assert [(piece.spec.name, piece.spec.flat_range) for _, piece in pieces] == [("2.D", (0, 4)), ("2.U", (0, 1))]


# ---- names -----------------------------------------------------------------------------------------------------------

PYTORCH = {
    "DTensor": "torch.distributed.tensor",
    "Shard": "torch.distributed.tensor",
    "Replicate": "torch.distributed.tensor",
    "Partial": "torch.distributed.tensor",
    "fully_shard": "torch.distributed.fsdp",
    "PipelineStage": "torch.distributed.pipelining",
    "Schedule1F1B": "torch.distributed.pipelining",
    "DeviceMesh": "torch.distributed.device_mesh",
    "ProcessGroup": "torch.distributed",
    "DistributedDataParallel": "torch.nn.parallel",
    "ZeroRedundancyOptimizer": "torch.distributed.optim",
    "parallelize_module": "torch.distributed.tensor.parallel",
    "ColwiseParallel": "torch.distributed.tensor.parallel",
    "RowwiseParallel": "torch.distributed.tensor.parallel",
    "context_parallel": "torch.distributed.tensor.experimental",
}
ARGUMENTS = {"bucket_cap_mb": "DistributedDataParallel", "reshard_after_forward": "fully_shard"}
OURS = {
    "Mesh": "common.process_groups",
    "Group": "common.group",
    "recompute_modules": "step01_single_gpu.recompute",
    "LossScaler": "step01_single_gpu.mixed_precision",
    "DataParallel": "step02_data_parallel.data_parallel",
    "Zero": "step03_zero.zero",
    "ZeroByLayer": "step03_zero.by_layer",
    "apply_tensor_parallel": "step04_tensor_parallel.apply_tensor_parallel",
    "ColumnParallelLinear": "step04_tensor_parallel.tensor_parallel",
    "RowParallelLinear": "step04_tensor_parallel.tensor_parallel",
    "Pipeline": "step05_pipeline.pipeline",
    "ring_attention": "step06_context_parallel.ring_attention",
    "TokenDispatcher": "step07_expert_parallel.expert_parallel",
    "MoE": "step07_expert_parallel.moe",
}
EXAMPLES = {"--recompute": "full", "--zero-replicas": "2 --zero 1", "--schedule": "1f1b --pp 2"}  # flags need values


def named_in(cells: list[str]) -> set[str]:
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def there(name: str, modules: dict[str, str]) -> object:
    return getattr(importlib.import_module(modules[name]), name)


def test_pytorchs_counterparts_exist():
    text = section("Our words beside PyTorch's")
    names = named_in([row[-1] for title in ("our word", "step") for row in rows(text, title)])
    for name in names - PYTORCH.keys() - ARGUMENTS.keys():
        if name == "1F0":  # an action in the file of a schedule, as PyTorch reads and writes it
            action = importlib.import_module("torch.distributed.pipelining.schedules")._Action.from_str(name)
            assert str(action) == name
        else:
            module, _, attribute = name.rpartition(".")
            assert module.startswith("torch"), f"{name} has no place in PYTORCH"
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:
                reduce(getattr, name.split(".")[1:], torch)
    assert names >= PYTORCH.keys() and names >= ARGUMENTS.keys()
    for name in PYTORCH:
        assert there(name, PYTORCH)
    for argument, owner in ARGUMENTS.items():
        assert argument in inspect.signature(there(owner, PYTORCH)).parameters


def test_our_names_exist():
    for step, ours, _ in rows(section("Our words beside PyTorch's"), "step"):
        for name in re.findall(r"`([^`]+)`", ours):
            if name.startswith("--"):
                configure(int(step), name if " " in name else f"{name} {EXAMPLES[name]}", 1 if step == "1" else 4)
            elif "/" in name:
                assert (ROOT / name).is_dir()
            else:
                module = OURS[name]
                assert there(name, OURS)
                assert step == "all" or module.startswith(f"step{int(step):02}"), f"{name} is not of step {step}"


# ---- bandwidths ------------------------------------------------------------------------------------------------------


def test_bandwidths_are_those_that_programs_calculate_with():
    text = section("Bandwidths")
    (header,) = re.findall(r"^\| H100s \| (.*) \|$", text, re.MULTILINE)
    published = {name.replace("-", "_"): list(map(float, row)) for name, *row in rows(text, "H100s")}
    assert published == {op: list(table.values()) for op, table in BUS_GB_PER_S.items()}
    assert all(list(table) == list(numbers(header)) for table in BUS_GB_PER_S.values())
    nominal = [cells[1] for cells in rows(text, "one H100")]
    assert nominal == [f"{H100_TFLOPS:.0f} TFLOP/s", f"{NVLINK / 1e9:.0f} GB/s", "50 GB/s"]
    assert NETWORK == 50e9 == 400e9 / 8 and NETWORK * NODE == 400e9
