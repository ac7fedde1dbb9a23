"""Checkpoints: complete or absent, and one clear line for every fault. Real layouts are in tests/resume."""

import json
import math
import resource
import shutil
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp  # here, so that the fork server imports it once for all ranks

from common.checkpoints import checkpoint, files
from common.checkpoints.boxes import SavedBox
from common.errors import UsageError
from common.launching import all_ranks
from common.launching.all_ranks import from_rank_0
from common.process_groups import Degrees, build_mesh
from step01_single_gpu.running.background_saves import BackgroundSaves
from tests.harness.ranks import run_ranks

SHAPES = {"parameter/weight": (7, 5), "exp_avg/gain": (6,), "exp_avg_sq/cube": (3, 2, 4), "parameter/scalar": ()}


def hold(rank=0, world=1, value=-1.0, axis=0):
    """A rank's parts of all tensors along an axis, mostly not contiguous; `value` None: the true ones."""
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
    """Save parts, what rank 0 alone owns and what all own. Returns sizes of files, and what is refused."""
    mesh, sizes, whole = start(world), [], hold(value=None)
    alone = [replace(each, owner=mesh.rank == 0) for each in whole]
    for step, held in enumerate((hold(mesh.rank, world, None), alone, whole)):
        folder = checkpoint.save(run_dir, step, held, {"rank": mesh.rank}, mesh)
        sizes.append([(folder / f"__{rank}_0.distcp").stat().st_size for rank in range(world)])
        assert checkpoint.load(folder, [], mesh) == {"rank": 0, "step": step}, "extra is that of rank 0"
    hole, overlap = (
        SavedBox("gain", (world + 1,), ((mesh.rank, mesh.rank + length),), torch.zeros(length)) for length in (1, 2)
    )
    lines = [error_of(checkpoint.save, run_dir, 9, [box], {}, mesh, kind=ValueError) for box in (hole, overlap)]
    other = SavedBox("other" if mesh.rank == 1 else "exp_avg/gain", (6,), ((0, 6),), torch.zeros(6))
    return sizes, [*lines, error_of(checkpoint.load, folder, [other], mesh)]


def test_who_writes_what(tmp_path):
    ((parts, alone, several), lines), *others = ranks = run_ranks(3, ranks_save, 3, tmp_path)
    assert others == ranks[:1] * 2 and lines[2].endswith("it holds no other"), "all ranks say the same"
    assert min(parts) > 0 and alone[0] > 0 and not any(alone[1:]), "only owners write"
    assert sum(several) < 1.1 * sum(alone) and sorted(several)[-2] > 0, "what all own, once, and not all by one rank"


def ranks_with_a_slow_disk(world, run_dir):
    """Rank 1 writes and reads nothing before the ranks have told each other twice that they are alive."""
    mesh, gather, wait, told = start(world), all_ranks.collectives.all_gather_objects, all_ranks.wait, []

    def slow(method):
        def call(*args):
            before, end = len(told), time.monotonic() + 20
            while mesh.rank == 1 and len(told) < before + 2:
                assert time.monotonic() < end, "the next message would come too late"
                time.sleep(0.01)
            return method(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_ranks, "wait", lambda work, seconds: wait(work, 0.05 * seconds))
        patch.setattr(all_ranks.collectives, "all_gather_objects", lambda *args: told.append(1) or gather(*args))
        for kind, name in ((dcp.FileSystemWriter, "write_data"), (dcp.FileSystemReader, "read_data")):
            patch.setattr(kind, name, slow(getattr(kind, name)))
        folder = checkpoint.save(run_dir, 1, hold(mesh.rank, world, None), {}, mesh)
        found = hold(mesh.rank, world)
        checkpoint.load(folder, found, mesh)
    assert_filled(found, mesh.rank, world)


def test_a_rank_with_a_slow_disk_keeps_in_touch(tmp_path):
    run_ranks(2, ranks_with_a_slow_disk, 2, tmp_path)


@pytest.mark.filterwarnings("error")
def test_what_fits_and_what_does_not(run_dir, mesh):
    held, folder = [replace(each, tensor=each.tensor.double()) for each in hold()], folder_of(run_dir, 20)
    checkpoint.load(folder, held, mesh)
    assert_filled(held, what="converted")
    shorter = SavedBox("exp_avg/gain", (5,), ((0, 5),), torch.zeros(5))
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


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def test_the_manifest(run_dir, mesh):
    folder, manifest = folder_of(run_dir, 20), folder_of(run_dir, 20) / "manifest.json"
    assert {"manifest.json", *json.loads(manifest.read_text())} == {each.name for each in folder.iterdir()}
    for content in (b"{", b"3", b'{"extra.json": {}}', b"\xff"):
        manifest.write_bytes(content)
        assert error_of(checkpoint.load, folder, [], mesh) == f"cannot load {folder}: manifest.json is corrupt"
    manifest.unlink()
    assert "sees no manifest.json" in error_of(checkpoint.load, folder, [], mesh)
    assert files.complete(run_dir) == [folder_of(run_dir, 10)]


def ranks_meet_faults(world, run_dir):
    """Each file is damaged in turn, one is missing; then the disk is full for rank 1, also in the background.

    Returns the errors, what was loaded instead of the damaged ones, and the files that this rank checked.
    """
    mesh, lines, checked, loaded, describe = start(world), {}, [], [], files._describe
    folder = checkpoint.save(run_dir, 5, hold(mesh.rank, world, None), {}, mesh)
    for file in sorted(json.loads((folder / "manifest.json").read_text())):
        content, held = (folder / file).read_bytes(), hold(mesh.rank, world)
        from_rank_0(mesh, lambda: flip_a_bit(folder / file))  # noqa: B023
        lines[file] = error_of(checkpoint.load, folder, held, mesh)
        assert all(each.tensor.eq(-1).all() for each in held), f"something was loaded, and {file} is damaged"
        from_rank_0(mesh, lambda: (folder / file).write_bytes(content))  # noqa: B023
    for file, damage in (("__1_0.distcp", Path.unlink), ("manifest.json", truncate)):
        damaged = checkpoint.save(run_dir, 6, hold(mesh.rank, world), {}, mesh)
        from_rank_0(mesh, lambda: damage(damaged / file))  # noqa: B023
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "_describe", lambda path: checked.append(path) or describe(path))
            loaded.append(checkpoint.load_intact([damaged, folder], held, mesh, None))
        assert_filled(held, mesh.rank, world)
    for most, size in ((200, 10), (100_000, 200_000)):  # less and more than what is buffered before it is written
        saves = BackgroundSaves(mesh, timeout=60)
        large = SavedBox("large", (world, size), ((mesh.rank, mesh.rank + 1), (0, size)), torch.zeros(1, size))
        with full_disk(most if mesh.rank == 1 else resource.RLIM_INFINITY):
            saves.save(run_dir, 6, [large, replace(large, owner=False)], {})
            lines[size] = error_of(saves.wait)
        assert len(saves.copies) == 1, "a box is copied that another rank saves"
    # A rank that looks at another storage must not make a checkpoint damaged
    found = [folder if mesh.rank == 0 else run_dir / "elsewhere", run_dir / "elsewhere"]
    _, _, lines["elsewhere"] = error_of(checkpoint.load_intact, found, held, mesh, None).partition(": ")
    return lines, loaded, sorted(path.name for path in checked if path.parent == folder)


def test_all_ranks_do_the_same_about_a_fault(tmp_path, capsys):
    (tmp_path / "checkpoints/step-00000006.damaged/old").mkdir(parents=True)
    ranks, folder = run_ranks(3, ranks_meet_faults, 3, tmp_path), folder_of(tmp_path, 5)
    lines, loaded, _ = ranks[0]
    assert all(each[:2] == ranks[0][:2] for each in ranks) and loaded == [(folder, {"step": 5})] * 2
    assert lines.pop(10).endswith("File too large") and lines.pop(200_000).endswith("is the disk full?")
    assert lines.pop("elsewhere").startswith("rank 1 sees no manifest.json there; all ranks must share")
    assert all(line.startswith(f"cannot load {folder}: {file} is corrupt") for file, line in lines.items())
    shares = [checked[::2] for *_, checked in ranks]
    assert sorted(sum(shares, [])) == sorted(lines) and all(shares), "each file by one rank"
    printed = [line for line in capsys.readouterr().out.splitlines() if "cannot load" in line]
    for what, line in zip(("__1_0.distcp cannot be read", "manifest.json is corrupt"), printed, strict=True):
        assert line.startswith(f"[rank 0] cannot load {folder_of(tmp_path, 6)}: {what}")
        assert line.endswith("; going on from step-00000005; renamed to step-00000006.damaged")
    shutil.copytree(folder, f"{folder}-copy")  # as a user may do
    assert {"05", "06.damaged"} <= set(names(tmp_path)) and files.complete(tmp_path) == [folder]
    assert not (tmp_path / "checkpoints/step-00000006.damaged/old").exists(), "it was an older one of the same step"
    for path in (tmp_path / "nothing", tmp_path / "checkpoints"):
        assert error_of(files.candidates, str(path), None).startswith(f"--resume {path}: there is no complete")


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
    for step, keep, left in [(30, 2, "20 30"), (30, 0, "20 30 30.old.tmp"), (40, 0, "20 30 40")]:
        checkpoint.save(run_dir, step, [], {"keep": keep}, mesh, keep)  # the second one of step 30 replaces the first
        assert names(run_dir) == left.split()
    assert checkpoint.load(folder_of(run_dir, 30), [], mesh)["keep"] == 0
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", die)
        checkpoint.save(run_dir, 60, [], {}, mesh, keep=1)
    assert names(run_dir) == ["20", "30", "40.tmp", "60"], "none is removed under its own name"
    checkpoint.save(run_dir, 70, [], {}, mesh, keep=1)
    assert names(run_dir) == ["70"]
    assert "cannot save" in error_of(checkpoint.save, folder_of(run_dir, 70) / "extra.json", 1, [], {}, mesh)
