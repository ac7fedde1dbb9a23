"""Checkpoints: any layout into any other, complete or absent, and one clear line for every fault."""

import json
import math
import resource
import shutil
import sys
import threading
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed.checkpoint as dcp  # here, so that the fork server imports it once for all ranks

from common import collectives
from common.all_ranks import from_rank_0
from common.checkpoints import checkpoint, files
from common.checkpoints.boxes import SavedBox
from common.errors import UsageError
from common.parameter import ParameterSpec
from common.process_groups import Degrees, build_mesh
from tests.harness.ranks import run_command, run_ranks

SHAPES = {"parameter/weight": (7, 5), "exp_avg/gain": (6,), "exp_avg_sq/cube": (3, 2, 4), "parameter/scalar": ()}
LAYOUTS = ("rows", "columns", "flat", "replicated")


def hold(layout, rank=0, world=1, value=-1.0, dtype=torch.float32, owner=False):
    """The boxes of a rank in a layout, filled with `value` or, if that is None, with their true values.

    The tensors are views, mostly not contiguous. `owner`: each rank owns what is replicated, and not only rank 0.
    """
    held = []
    for name, shape in SHAPES.items():
        numbers = torch.arange(math.prod(shape), dtype=dtype) + 100 * list(SHAPES).index(name) + 1
        whole = numbers.view(shape) if value is None else torch.full(shape, value, dtype=dtype)
        box, owns = [(0, size) for size in shape], True
        if layout == "flat" and shape:
            flat_range = len(numbers) * rank // world, len(numbers) * (rank + 1) // world
            spec = ParameterSpec(name, shape, tuple(box), None, flat_range=flat_range)
            held += [SavedBox(name, shape, *each) for each in spec.boxes(whole.flatten()[slice(*flat_range)])]
            continue
        if layout == "replicated" or not shape:
            owns = owner or rank == 0
        else:
            axis = 0 if layout == "rows" else -1
            box[axis] = shape[axis] * rank // world, shape[axis] * (rank + 1) // world
        held.append(SavedBox(name, shape, tuple(box), whole[tuple(slice(*each) for each in box)], owns))
    return held


def assert_filled(held, *layout, what="", **options):
    for each, expected in zip(held, hold(*layout, value=None, **options), strict=True):
        assert torch.equal(each.tensor, expected.tensor), f"{what}: {each.name} {each.box} is {each.tensor}"


def folder_of(run_dir, step):
    return run_dir / "checkpoints" / f"step-{step:08d}"


def names(run_dir):
    """All that is in the folder of checkpoints, shortened: "20" and "20.tmp"."""
    return [path.name.removeprefix("step-000000") for path in sorted((run_dir / "checkpoints").iterdir())]


def start(world=1):
    return build_mesh(Degrees(dp=world), torch.device("cpu"))


def error_of(function, *args):
    """The one line of the UsageError that the call raises."""
    with pytest.raises(UsageError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@contextmanager
def full_disk(most):
    """No file of this process may grow beyond `most` bytes (None: any size)."""
    if most is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture
def mesh():
    return start()


@pytest.fixture
def run_dir(tmp_path, mesh):
    """A run folder with checkpoints of steps 10 and 20, saved by one process."""
    for step in (10, 20):
        checkpoint.save(tmp_path, step, hold("replicated", value=None), {"scale": 2.0**step}, mesh)
    return tmp_path


# ---- layouts ---------------------------------------------------------------------------------------------------------


def ranks_save(world, run_dir):
    """Save in every layout. Returns the sizes of all ranks' files, and the errors of what is refused."""
    mesh, sizes, lines = start(world), {}, []
    for step, layout in enumerate((*LAYOUTS, "several owners")):
        several = {"layout": "replicated", "owner": True} if layout == "several owners" else {"layout": layout}
        held = hold(rank=mesh.rank, world=world, value=None, **several)
        folder = checkpoint.save(run_dir, step, held, {"layout": layout, "rank": mesh.rank}, mesh)
        sizes[layout] = [(folder / f"__{rank}_0.distcp").stat().st_size for rank in range(world)]
    for length in (1, 2):  # the owned boxes leave a hole; they overlap
        box = SavedBox("gain", (world + 1,), ((mesh.rank, mesh.rank + length),), torch.zeros(length))
        with pytest.raises(ValueError) as caught:
            checkpoint.save(run_dir, 9, [box], {}, mesh)
        lines.append(str(caught.value))
    other = SavedBox("other" if mesh.rank == 1 else "exp_avg/gain", (6,), ((0, 6),), torch.zeros(6))
    return sizes, [*lines, error_of(checkpoint.load, folder, [other], mesh)]


def ranks_load(world, folders, layouts):
    mesh, extras = start(world), []
    for folder in folders:
        for layout in layouts:
            held = hold(layout, mesh.rank, world)
            extras.append(checkpoint.load(folder, held, mesh))
            assert_filled(held, layout, mesh.rank, world, what=folder)
    return extras


def test_every_layout_loads_into_every_other(run_dir):
    saved = {1: [folder_of(run_dir, 20)]}
    for world in (2, 4):
        (sizes, lines), *others = run_ranks(world, ranks_save, world, run_dir / f"{world}")
        assert others == [(sizes, lines)] * (world - 1), "all ranks refuse with the same words"
        assert lines[2].endswith("it holds no other")
        assert sizes["replicated"][0] > 0 and not any(sizes["replicated"][1:]), "only owners write"
        assert sum(sizes["several owners"]) < 1.1 * sum(sizes["replicated"]), "each box is written once"
        assert sorted(sizes["several owners"])[-2] > 0, "and not all by one rank"
        saved[world] = [folder_of(run_dir / f"{world}", step) for step in range(len(LAYOUTS))]
    extras = [{"layout": layout, "rank": 0, "step": step} for step, layout in enumerate(LAYOUTS)]
    assert ranks_load(1, saved[4], ["replicated"]) == extras
    for world, layouts in [(3, ["rows", "columns", "flat"]), (4, ["columns", "flat"])]:
        for found in run_ranks(world, ranks_load, world, [*saved[2], *saved[1]], layouts):
            assert found == [each for each in [*extras, {"scale": 2.0**20, "step": 20}] for _ in layouts]


def test_types_are_converted(run_dir, mesh):
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        held = 2 * hold("columns", dtype=dtype)  # also if one rank holds a box twice
        checkpoint.load(folder_of(run_dir, 20), held, mesh)
        assert {each.tensor.dtype for each in held} == {dtype}
        assert_filled(held[: len(held) // 2], "columns", dtype=dtype)
        assert_filled(held[len(held) // 2 :], "columns", dtype=dtype)
    narrow, held = 2 * hold("replicated", value=None, dtype=torch.bfloat16), hold("replicated")
    checkpoint.load(checkpoint.save(run_dir, 30, narrow, {}, mesh), held, mesh)
    assert all(torch.equal(each.tensor, other.tensor.float()) for each, other in zip(held, narrow))


def test_padding_is_neither_saved_nor_touched(tmp_path, mesh):
    spec = ParameterSpec("embedding.weight", (6, 3), ((0, 8), (0, 3)), 0.02)  # 2 rows of padding
    parameter, name = torch.nn.Parameter(torch.randn(8, 3)), "parameter/embedding.weight"
    folder = checkpoint.save(tmp_path, 1, SavedBox.of("parameter", spec, parameter), {}, mesh)
    outside = SavedBox(name, (6, 3), ((9, 12), (0, 3)), torch.full((3, 3), -1.0))
    wider = SavedBox(name, (6, 3), ((4, 10), (0, 3)), torch.nn.Parameter(torch.full((6, 3), -1.0)))
    checkpoint.load(folder, [outside, wider], mesh)
    assert torch.equal(wider.tensor[:2], parameter[4:6])
    assert wider.tensor[2:].eq(-1).all() and outside.tensor.eq(-1).all()


def test_what_does_not_fit(run_dir, mesh):
    with pytest.raises(ValueError, match=r"weight: shape \(2, 5\)"):
        SavedBox("weight", (7, 5), ((0, 3), (0, 5)), torch.zeros(2, 5))
    folder = folder_of(run_dir, 20)
    other, shorter = (SavedBox(*each, ((0, 5),), torch.zeros(5)) for each in [("other", (5,)), ("exp_avg/gain", (5,))])
    assert error_of(checkpoint.load, folder, [other], mesh) == f"cannot load {folder}: it holds no other"
    assert "exp_avg/gain has shape (6,) there and (5,)" in error_of(checkpoint.load, folder, [shorter], mesh)
    checkpoint.load(folder, hold("replicated")[:1], mesh)  # whatever else it holds does not matter
    half = checkpoint.save(run_dir, 30, hold("rows", 0, 2), {}, mesh)
    assert "holds only a part of parameter/weight" in error_of(checkpoint.load, half, hold("replicated"), mesh)


def test_no_warning_and_exact_numbers(tmp_path, mesh):
    extra = {"third": 1 / 3, "large": 2.0**1000, "names": ["a", None, True]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder = checkpoint.save(tmp_path, 7, hold("replicated"), extra, mesh)
        assert checkpoint.load(folder, hold("replicated"), mesh) == {**extra, "step": 7}
    code = "import common.checkpoints.checkpoint, sys; sys.exit('torch.distributed.checkpoint' in sys.modules)"
    assert run_command([sys.executable, "-c", code]).returncode == 0, "runs that save nothing need not wait for it"


# ---- damage ----------------------------------------------------------------------------------------------------------


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


FAULTS = {
    "flipped": (flip_a_bit, "is corrupt: its size or SHA-256 is not that of manifest.json"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is corrupt"),
    "empty": (lambda path: path.write_bytes(b""), "is corrupt"),
    "missing": (lambda path: path.unlink(), "cannot be read: No such file or directory"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "extra.json"])
def test_a_damaged_file_is_named(run_dir, mesh, file, fault):
    folder, (damage, message), held = folder_of(run_dir, 20), FAULTS[fault], hold("replicated")
    damage(folder / file)
    assert error_of(checkpoint.load, folder, held, mesh).startswith(f"cannot load {folder}: {file} {message}")
    assert all(each.tensor.eq(-1).all() for each in held), "refused before anything was loaded"


def test_the_manifest(run_dir, mesh):
    folder, manifest = folder_of(run_dir, 20), folder_of(run_dir, 20) / "manifest.json"
    assert {"manifest.json", *json.loads(manifest.read_text())} == {each.name for each in folder.iterdir()}
    for content in (b"", b"{", b"[1]", b'{"a": 1}', b'{"extra.json": {}}', b"3", b"\xff"):
        manifest.write_bytes(content)
        assert error_of(checkpoint.load, folder, [], mesh) == f"cannot load {folder}: manifest.json is corrupt"
    manifest.unlink()
    assert "sees no manifest.json" in error_of(checkpoint.load, folder, [], mesh)
    assert files.complete(run_dir) == [folder_of(run_dir, 10)]


def ranks_meet_faults(world, run_dir):
    """Each file is damaged in turn; then the disk is full for rank 1. Returns the errors, and the files it checked."""
    mesh, lines, checked, describe = start(world), {}, [], files._describe
    folder = checkpoint.save(run_dir, 5, hold("rows", mesh.rank, world), {}, mesh)
    for file in sorted(json.loads((folder / "manifest.json").read_text())):
        content = (folder / file).read_bytes()
        collectives.barrier(mesh.world)
        from_rank_0(mesh, lambda: flip_a_bit(folder / file))  # noqa: B023
        lines[file] = error_of(checkpoint.load, folder, hold("rows", mesh.rank, world), mesh)
        from_rank_0(mesh, lambda: (folder / file).write_bytes(content))  # noqa: B023
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_describe", lambda path: checked.append(path.name) or describe(path))
        checkpoint.load(folder, hold("rows", mesh.rank, world), mesh)
    for most, size in ((200, 10), (100_000, 200_000)):  # less and more than what is buffered before it is written
        large = SavedBox("large", (world, size), ((mesh.rank, mesh.rank + 1), (0, size)), torch.zeros(1, size))
        with full_disk(most if mesh.rank == 1 else None):
            lines[size] = error_of(checkpoint.save, run_dir, 6, [large], {}, mesh)
    return lines, checked


def test_all_ranks_raise_the_same(tmp_path):
    ranks = run_ranks(3, ranks_meet_faults, 3, tmp_path)
    lines, folder = ranks[0][0], folder_of(tmp_path, 5)
    assert [each for each, _ in ranks] == [lines] * 3
    assert lines.pop(10).endswith("File too large") and lines.pop(200_000).endswith("is the disk full?")
    assert all(line.startswith(f"cannot load {folder}: {file} is corrupt") for file, line in lines.items())
    assert files.complete(tmp_path) == [folder]
    assert sorted(file for _, checked in ranks for file in checked) == sorted(lines), "each file by one rank"
    assert [len(checked) for _, checked in ranks] == [2, 2, 1]


class Died(BaseException):
    pass


def die(*args, **options):
    raise Died


@pytest.mark.parametrize("where", ["files._write", "boxes.write", "files._describe", "files._flush", "files.finish"])
@pytest.mark.parametrize("step", [20, 30])
def test_dying_half_way_leaves_the_one_before(run_dir, mesh, monkeypatch, where, step):
    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(f"common.checkpoints.{where}", die)
        checkpoint.save(run_dir, step, hold("replicated"), {}, mesh, keep=1)
    assert names(run_dir) == sorted(["10", "20", f"{step}.tmp"]), "older ones go when the new one is complete"
    held = hold("replicated")
    assert checkpoint.load(files.complete(run_dir)[0], held, mesh)["step"] == 20
    assert_filled(held, "replicated")  # untouched, also by an attempt to save step 20 again
    checkpoint.save(run_dir, 40, hold("replicated"), {}, mesh)
    assert names(run_dir) == ["10", "20", "40"]


def test_keep_lets_go_of_the_oldest(run_dir, mesh, monkeypatch):
    for step, keep, left in [(30, 4, "10 20 30"), (40, 3, "20 30 40"), (40, 2, "30 40"), (50, 0, "30 40 50")]:
        checkpoint.save(run_dir, step, [], {"keep": keep}, mesh, keep)
        assert [name for name in names(run_dir) if "tmp" not in name] == left.split()
        assert checkpoint.load(folder_of(run_dir, step), [], mesh)["keep"] == keep, "also when it replaces one"
    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(shutil, "rmtree", die)
        checkpoint.save(run_dir, 60, [], {}, mesh, keep=1)
    assert names(run_dir) == ["30", "40", "50.tmp", "60"]
    checkpoint.save(run_dir, 70, [], {}, mesh, keep=1)
    assert names(run_dir) == ["70"]
    (run_dir / "file").write_text("")
    assert "cannot save" in error_of(checkpoint.save, run_dir / "file", 1, [], {}, mesh)


# ---- in the background -----------------------------------------------------------------------------------------------


@contextmanager
def slow_writer():
    """Yields an event, before which no file of a checkpoint is written, and a list of the tensors to be written."""
    gate, written, write_data = threading.Event(), [], dcp.FileSystemWriter.write_data

    def wait_and_write(writer, plan, planner):
        written.extend(planner.resolve_data(item) for item in plan.items)
        assert gate.wait(60), "nobody opened the gate"
        return write_data(writer, plan, planner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, "write_data", wait_and_write)
        yield gate, written


def ranks_save_in_background(world, run_dir):
    """Updates and collectives go on while files are written; what is saved is what was there at the call."""
    mesh, total = start(world), torch.ones(1)
    saves = checkpoint.BackgroundSaves(mesh, timeout=60)
    held, seen = hold("rows", mesh.rank, world, value=None), hold("flat", mesh.rank, world)
    with slow_writer() as (gate, written):
        saves.save(run_dir, 10, held, {"scale": 0.5}, keep=1)
        for each in held:
            each.tensor.zero_()
        for _ in range(5):  # the ranks reach the background's collectives at different moments between these
            collectives.all_reduce(total, mesh.world)
        during = files.complete(run_dir)
        gate.set()
        saves.save(run_dir, 20, hold("columns", mesh.rank, world), {})  # waits for the other
        extra = checkpoint.load(folder_of(run_dir, 10), seen, mesh)
        assert_filled(seen, "flat", mesh.rank, world)
        saves.wait()
    excess = sum(each.untyped_storage().nbytes() - each.nbytes for each in written)
    with full_disk(200 if mesh.rank == world - 1 else None):
        saves.save(run_dir, 30, hold("rows", mesh.rank, world), {}, keep=1)
        return {"seen": (during, extra, total.item(), excess), "line": error_of(saves.wait)}


@pytest.mark.parametrize("world", [1, 3])
def test_save_in_the_background(tmp_path, world):
    first, *others = run_ranks(world, ranks_save_in_background, world, tmp_path)
    assert others == [first] * (world - 1)
    copied = "of views, the boxes are copied and not the storage behind them"
    assert first["seen"] == ([], {"scale": 0.5, "step": 10}, world**5, 0), copied
    assert first["line"].startswith(f"cannot save {tmp_path}") and first["line"].endswith("File too large")
    assert files.complete(tmp_path) == [folder_of(tmp_path, 20), folder_of(tmp_path, 10)]


# ---- resuming --------------------------------------------------------------------------------------------------------


def test_candidates(run_dir):
    checkpoints, last, first = run_dir / "checkpoints", folder_of(run_dir, 20), folder_of(run_dir, 10)
    for name in ("step-00000030", "step-00000040.tmp", "step-00000050.damaged", "other"):
        (checkpoints / name).mkdir()
        if name != "step-00000030":  # which has no manifest
            (checkpoints / name / "manifest.json").write_text("{}")
    for resume, found in [("auto", [last, first]), (str(run_dir), [last]), (str(first), [first])]:
        assert files.candidates(resume, run_dir) == found, "a path means one checkpoint"
    assert files.candidates("auto", run_dir / "nothing") == []
    for path in (run_dir / "nothing", checkpoints, checkpoints / "step-00000030"):
        assert error_of(files.candidates, str(path), None).startswith(f"--resume {path}: there is no complete")


DAMAGE = {20: ("__0_0.distcp", "flipped"), 30: (".metadata", "truncated"), 40: ("extra.json", "empty")}
DAMAGE |= {50: ("manifest.json", "truncated"), 60: ("__1_0.distcp", "missing")}


def ranks_load_intact(run_dir):
    mesh, outcomes = start(2), []
    for step, (file, fault) in DAMAGE.items():
        folder = checkpoint.save(run_dir, step, hold("rows", mesh.rank, 2), {}, mesh)
        from_rank_0(mesh, lambda: FAULTS[fault][0](folder / file))  # noqa: B023
        held, found = hold("flat", mesh.rank, 2), from_rank_0(mesh, lambda: files.candidates("auto", run_dir))
        intact, extra = checkpoint.load_intact(found, held, mesh, None)
        assert_filled(held, "flat", mesh.rank, 2, what=file)
        outcomes.append((intact.name, extra["step"]))
    # A rank that looks at another storage must not make a checkpoint damaged
    found = [folder_of(run_dir, 10) if mesh.rank == 0 else run_dir / "elsewhere", run_dir / "elsewhere"]
    return outcomes, error_of(checkpoint.load_intact, found, held, mesh, None)


def test_a_damaged_one_gives_way_to_the_one_before(tmp_path, mesh, capsys):
    checkpoint.save(tmp_path, 10, hold("replicated", value=None), {}, mesh)
    for outcomes, line in run_ranks(2, ranks_load_intact, tmp_path):
        assert outcomes == [("step-00000010", 10)] * len(DAMAGE)
        assert line.endswith("rank 1 sees no manifest.json there; all ranks must share the storage of --run-dir")
    lines = [line for line in capsys.readouterr().out.splitlines() if "cannot load" in line]
    assert len(lines) == len(DAMAGE) and all(line.startswith("[rank 0]") for line in lines)
    for (step, (file, _)), line in zip(DAMAGE.items(), lines):
        assert f"checkpoints/step-000000{step}: {file} " in line
        assert line.endswith(f"; renamed to step-000000{step}.damaged, going on from step-00000010")
    assert names(tmp_path) == ["10", *(f"{step}.damaged" for step in DAMAGE)]
