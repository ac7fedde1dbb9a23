"""Checkpoints: complete or absent, and one clear line for every fault. Real layouts are in tests/resume."""

import json
import math
import resource
import shutil
import threading
from contextlib import contextmanager
from dataclasses import replace

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
from step01_single_gpu.background_saves import BackgroundSaves
from tests.harness.ranks import run_ranks

SHAPES = {"parameter/weight": (7, 5), "exp_avg/gain": (6,), "exp_avg_sq/cube": (3, 2, 4), "parameter/scalar": ()}


def hold(rank=0, world=1, value=-1.0, axis=0):
    """A rank's parts of all tensors along an axis, mostly not contiguous; with their true values if `value` is None."""
    held = []
    for index, (name, shape) in enumerate(SHAPES.items()):
        numbers = torch.arange(math.prod(shape)) + 100.0 * index + 1
        values = (numbers if value is None else torch.full_like(numbers, value)).view(shape)
        box = [(0, size) for size in shape]
        if shape:
            box[axis] = shape[axis] * rank // world, shape[axis] * (rank + 1) // world
        part = values[tuple(slice(*each) for each in box)]
        held.append(SavedBox(name, shape, tuple(box), part, owner=bool(shape) or rank == 0))
    return held


def assert_filled(held, *part, what="", **options):
    for each, expected in zip(held, hold(*part, value=None, **options), strict=True):
        assert torch.equal(each.tensor, expected.tensor), f"{what}: {each.name} {each.box} is {each.tensor}"


def folder_of(run_dir, step):
    return run_dir / "checkpoints" / f"step-{step:08d}"


def names(run_dir):
    """All that is in the folder of checkpoints, shortened: "20" and "20.tmp"."""
    return [path.name.removeprefix("step-000000") for path in sorted((run_dir / "checkpoints").iterdir())]


def start(world=1):
    return build_mesh(Degrees(dp=world), torch.device("cpu"))


def error_of(function, *args, kind=UsageError):
    """The one line of the error that the call raises."""
    with pytest.raises(kind, match=r"^.*$") as caught:
        function(*args)
    return str(caught.value)


@contextmanager
def full_disk(most):
    """No file of this process may grow beyond `most` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture
def mesh():
    return start()


@pytest.fixture
def run_dir(tmp_path, mesh):
    for step in (10, 20):
        checkpoint.save(tmp_path, step, hold(value=None), {"large": 2.0**1000}, mesh)
    return tmp_path


def ranks_save(world, run_dir):
    """Save parts, what rank 0 alone owns and what all own. Returns the sizes of all files, and what is refused."""
    mesh, sizes, lines, whole = start(world), [], [], hold(value=None)
    alone = [replace(each, owner=mesh.rank == 0) for each in whole]
    for step, held in enumerate((hold(mesh.rank, world, None), alone, whole)):
        folder = checkpoint.save(run_dir, step, held, {"rank": mesh.rank}, mesh)
        sizes.append([(folder / f"__{rank}_0.distcp").stat().st_size for rank in range(world)])
        held = hold(mesh.rank, world, axis=-1)
        assert checkpoint.load(folder, held, mesh) == {"rank": 0, "step": step}, "extra is that of rank 0"
        assert_filled(held, mesh.rank, world, axis=-1)
    for length in (1, 2):  # the owned boxes leave a hole; they overlap
        box = SavedBox("gain", (world + 1,), ((mesh.rank, mesh.rank + length),), torch.zeros(length))
        lines.append(error_of(checkpoint.save, run_dir, 9, [box], {}, mesh, kind=ValueError))
    other = SavedBox("other" if mesh.rank == 1 else "exp_avg/gain", (6,), ((0, 6),), torch.zeros(6))
    return sizes, [*lines, error_of(checkpoint.load, folder, [other], mesh)]


def test_who_writes_what(tmp_path):
    ((parts, alone, several), lines), *others = ranks = run_ranks(3, ranks_save, 3, tmp_path)
    assert others == ranks[:1] * 2 and lines[2].endswith("it holds no other"), "all ranks say the same"
    assert min(parts) > 0 and alone[0] > 0 and not any(alone[1:]), "only owners write"
    assert sum(several) < 1.1 * sum(alone) and sorted(several)[-2] > 0, "what all own, once, and not all by one rank"


@pytest.mark.filterwarnings("error")
def test_types_and_padding(run_dir, mesh):
    held = [replace(each, tensor=each.tensor.double()) for each in hold() + hold()]  # a rank may hold a box twice
    checkpoint.load(folder_of(run_dir, 20), held, mesh)
    for each, expected in zip(held, 2 * hold(value=None)):
        assert torch.equal(each.tensor, expected.tensor.double())
    name, spec = "parameter/embedding", ParameterSpec("embedding", (6, 3), ((0, 8), (0, 3)), 0.02)
    folder = checkpoint.save(run_dir, 30, 2 * SavedBox.of("parameter", spec, torch.ones(8, 3)), {}, mesh)
    outside = SavedBox(name, (6, 3), ((9, 12), (0, 3)), torch.zeros(3, 3))
    wider = SavedBox(name, (6, 3), ((4, 10), (0, 3)), torch.nn.Parameter(torch.zeros(6, 3)))
    checkpoint.load(folder, [outside, wider], mesh)
    assert wider.tensor[:2].eq(1).all() and not wider.tensor[2:].any() and not outside.tensor.any()


def test_what_does_not_fit(run_dir, mesh):
    with pytest.raises(ValueError, match=r"weight: shape \(2, 5\)"):
        SavedBox("weight", (7, 5), ((0, 3), (0, 5)), torch.zeros(2, 5))
    folder = folder_of(run_dir, 20)
    other, shorter = (SavedBox(*each, ((0, 5),), torch.zeros(5)) for each in [("other", (5,)), ("exp_avg/gain", (5,))])
    assert error_of(checkpoint.load, folder, [other], mesh) == f"cannot load {folder}: it holds no other"
    assert "exp_avg/gain has shape (6,) there and (5,)" in error_of(checkpoint.load, folder, [shorter], mesh)
    half = checkpoint.save(run_dir, 30, hold(0, 2), {}, mesh)
    assert "holds only a part of parameter/weight" in error_of(checkpoint.load, half, hold(), mesh)


def test_no_writer_opens_a_cuda_context(run_dir, mesh, monkeypatch):
    """DCP's loader that copies ahead would, on GPU 0, whichever GPU the rank uses. It is taken where there is CUDA."""
    from torch.distributed.checkpoint import filesystem

    monkeypatch.setattr(filesystem.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", None)  # to call it would be a TypeError
    checkpoint.save(run_dir, 30, hold(), {}, mesh)
    assert folder_of(run_dir, 30) in files.complete(run_dir)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


FAULTS = {"flipped": flip_a_bit, "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1])}
FAULTS |= {"empty": lambda path: path.write_bytes(b""), "missing": lambda path: path.unlink()}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "extra.json"])
def test_a_damaged_file_is_named(run_dir, mesh, file, fault):
    folder, held = folder_of(run_dir, 20), hold()
    FAULTS[fault](folder / file)
    what = "cannot be read: No such file or directory" if fault == "missing" else "is corrupt: its size or SHA-256 is"
    assert error_of(checkpoint.load, folder, held, mesh).startswith(f"cannot load {folder}: {file} {what}")
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
    folder = checkpoint.save(run_dir, 5, hold(mesh.rank, world), {}, mesh)
    for file in sorted(json.loads((folder / "manifest.json").read_text())):
        content = (folder / file).read_bytes()
        from_rank_0(mesh, lambda: flip_a_bit(folder / file))  # noqa: B023
        lines[file] = error_of(checkpoint.load, folder, hold(mesh.rank, world), mesh)
        from_rank_0(mesh, lambda: (folder / file).write_bytes(content))  # noqa: B023
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_describe", lambda path: checked.append(path.name) or describe(path))
        checkpoint.load(folder, hold(mesh.rank, world), mesh)
    for most, size in ((200, 10), (100_000, 200_000)):  # less and more than what is buffered before it is written
        large = SavedBox("large", (world, size), ((mesh.rank, mesh.rank + 1), (0, size)), torch.zeros(1, size))
        with full_disk(most if mesh.rank == 1 else resource.RLIM_INFINITY):
            lines[size] = error_of(checkpoint.save, run_dir, 6, [large], {}, mesh)
    return lines, checked


def test_all_ranks_raise_the_same(tmp_path):
    ranks = run_ranks(3, ranks_meet_faults, 3, tmp_path)
    lines, folder = ranks[0][0], folder_of(tmp_path, 5)
    assert all(each == lines for each, _ in ranks)
    assert lines.pop(10).endswith("File too large") and lines.pop(200_000).endswith("is the disk full?")
    assert all(line.startswith(f"cannot load {folder}: {file} is corrupt") for file, line in lines.items())
    assert files.complete(tmp_path) == [folder]
    assert sorted(file for _, checked in ranks for file in checked) == sorted(lines), "each file by one rank"
    assert [len(checked) for _, checked in ranks] == [2, 2, 1]


def die(*args, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", "files._write boxes.write files._describe files._flush files.Path.rename".split())
@pytest.mark.parametrize("step", [20, 30])
def test_dying_half_way_leaves_the_one_before(run_dir, mesh, monkeypatch, where, step):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"common.checkpoints.{where}", die)
        checkpoint.save(run_dir, step, hold(), {}, mesh, keep=1)
    assert names(run_dir) == sorted(["10", "20", f"{step}.tmp"]), "older ones go when the new one is complete"
    held = hold()
    assert checkpoint.load(files.complete(run_dir)[0], held, mesh) == {"large": 2.0**1000, "step": 20}
    assert_filled(held)  # untouched, also by an attempt to save step 20 again
    checkpoint.save(run_dir, 40, hold(), {}, mesh)
    assert names(run_dir) == ["10", "20", "40"]


def test_keep_lets_go_of_the_oldest(run_dir, mesh, monkeypatch):
    for step, keep, left in [(30, 3, "10 20 30"), (40, 2, "30 40"), (40, 0, "30 40 40.old.tmp"), (50, 0, "30 40 50")]:
        checkpoint.save(run_dir, step, [], {"keep": keep}, mesh, keep)  # the second one of step 40 replaces the first
        assert names(run_dir) == left.split()
    assert checkpoint.load(folder_of(run_dir, 40), [], mesh)["keep"] == 0
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", die)
        checkpoint.save(run_dir, 60, [], {}, mesh, keep=1)
    assert names(run_dir) == ["30", "40", "50.tmp", "60"]
    checkpoint.save(run_dir, 70, [], {}, mesh, keep=1)
    assert names(run_dir) == ["70"]
    assert "cannot save" in error_of(checkpoint.save, folder_of(run_dir, 70) / "extra.json", 1, [], {}, mesh)


def ranks_save_in_background(world, run_dir):
    """Updates and collectives go on while files are written; what is saved is what was there at the call."""
    mesh, gate, written, write_data = start(world), threading.Event(), [], dcp.FileSystemWriter.write_data
    held, seen = hold(mesh.rank, world, None), hold(mesh.rank, world, axis=-1)
    saves, total, save, copied = BackgroundSaves(mesh, timeout=60), torch.ones(1), checkpoint.save, []

    def wait_and_write(writer, plan, planner):
        written.extend(planner.resolve_data(item) for item in plan.items)
        assert gate.wait(60), "nobody opened the gate"
        return write_data(writer, plan, planner)

    def save_copies(run_dir, step, copies, *rest):
        copied.extend(copies)
        return save(run_dir, step, copies, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, "write_data", wait_and_write)
        patch.setattr(checkpoint, "save", save_copies)
        saves.save(run_dir, 10, held, {"scale": 0.5}, keep=1)
        for each in held:
            each.tensor.zero_()
        for _ in range(5):  # the ranks reach the background's collectives at different moments between these
            collectives.all_reduce(total, mesh.world)
        during = files.complete(run_dir)
        gate.set()
        saves.save(run_dir, 20, hold(mesh.rank, world), {})  # waits for the other
        extra = checkpoint.load(folder_of(run_dir, 10), seen, mesh)
        assert_filled(seen, mesh.rank, world, axis=-1)
        saves.wait()
    assert copied and all(each.owner for each in copied), "boxes that another rank saves are copied"
    excess = sum(each.untyped_storage().nbytes() - each.nbytes for each in written)
    with full_disk(200 if mesh.rank == world - 1 else resource.RLIM_INFINITY):
        memory = [each.data_ptr() for each in saves.copies]
        saves.save(run_dir, 30, hold(mesh.rank, world), {}, keep=1)
        assert memory == [each.data_ptr() for each in saves.copies], "the memory for copies is not kept"
        return (during, extra, total.item(), excess), error_of(saves.wait)


@pytest.mark.parametrize("world", [1, 3])
def test_save_in_the_background(tmp_path, world):
    (seen, line), *others = run_ranks(world, ranks_save_in_background, world, tmp_path)
    assert others == [(seen, line)] * (world - 1)
    assert seen == ([], {"scale": 0.5, "step": 10}, world**5, 0), "boxes are copied, not the storage behind them"
    assert line.startswith(f"cannot save {tmp_path}") and line.endswith("File too large")
    assert files.complete(tmp_path) == [folder_of(tmp_path, 20), folder_of(tmp_path, 10)]


def ranks_load_intact(run_dir):
    mesh, folders = start(2), []
    for step, file, fault in ((20, "__1_0.distcp", "missing"), (30, "manifest.json", "truncated")):
        folder = checkpoint.save(run_dir, step, hold(mesh.rank, 2), {}, mesh)
        from_rank_0(mesh, lambda: FAULTS[fault](folder / file))  # noqa: B023
        held, found = hold(mesh.rank, 2, axis=-1), from_rank_0(mesh, lambda: files.candidates("auto", run_dir))
        folders.append(checkpoint.load_intact(found, held, mesh, None))
        assert_filled(held, mesh.rank, 2, what=file, axis=-1)
    # A rank that looks at another storage must not make a checkpoint damaged
    found = [folder_of(run_dir, 10) if mesh.rank == 0 else run_dir / "elsewhere", run_dir / "elsewhere"]
    return folders, error_of(checkpoint.load_intact, found, held, mesh, None)


def test_a_damaged_one_gives_way_to_the_one_before(tmp_path, mesh, capsys):
    folder = checkpoint.save(tmp_path, 10, hold(value=None), {}, mesh)
    (tmp_path / "checkpoints/step-00000020.damaged/old").mkdir(parents=True)
    for folders, line in run_ranks(2, ranks_load_intact, tmp_path):
        assert folders == [(folder, {"step": 10})] * 2
        assert line.endswith("rank 1 sees no manifest.json there; all ranks must share the storage of --run-dir")
    lines = [line for line in capsys.readouterr().out.splitlines() if "cannot load" in line]
    faults = "__1_0.distcp cannot be read", "manifest.json is corrupt"
    for step, what, line in zip((20, 30), faults, lines, strict=True):
        assert line.startswith(f"[rank 0] cannot load {folder_of(tmp_path, step)}: {what}")
        assert line.endswith(f"; going on from step-00000010; renamed to step-000000{step}.damaged")
    assert names(tmp_path) == ["10", "20.damaged", "30.damaged"]
    assert not (tmp_path / "checkpoints/step-00000020.damaged/old").exists(), "it was an older one of the same step"
    for path in (tmp_path / "nothing", tmp_path / "checkpoints"):
        assert error_of(files.candidates, str(path), None).startswith(f"--resume {path}: there is no complete")
