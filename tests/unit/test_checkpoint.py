"""Checkpoints: any layout into any other, complete or not there at all, one clear line for every fault."""

import io
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
import torch.distributed.checkpoint  # noqa: F401, so that the fork server imports it once for all ranks
from torch import nn

from common import collectives
from common.checkpoints import checkpoint
from common.checkpoints import files as checkpoint_files
from common.checkpoints.boxes import SavedBox
from common.errors import UsageError
from common.parameter import ParameterSpec
from common.process_groups import Degrees, build_mesh
from tests.harness.ranks import run_command, run_ranks

SHAPES = {
    "parameter/weight": (7, 5),
    "exp_avg/gain": (6,),
    "exp_avg_sq/cube": (3, 2, 4),
    "parameter/scalar": (),
}
LAYOUTS = ("rows", "columns", "grid", "flat", "replicated")


def whole(name, dtype=torch.float32):
    """The values of the whole tensor, all different."""
    numbers = torch.arange(1, 1 + math.prod(SHAPES[name]), dtype=dtype)
    return (numbers + 100 * list(SHAPES).index(name)).view(SHAPES[name])


def part(size, index, count):
    """(start, stop) of part `index` of `count` as equal as can be, some of them empty."""
    return size * index // count, size * (index + 1) // count


def boxes(layout, shape, rank, world):
    """What a rank holds of a tensor under a layout: a list of boxes, and whether it owns them."""
    full = [(0, size) for size in shape]
    if layout in ("replicated", "replicas") or not shape:
        return [full], rank == 0 or layout == "replicas"
    if layout == "flat":
        start, stop = piece = part(math.prod(shape), rank, world)
        spec = ParameterSpec("", shape, tuple(full), None, flat_range=piece)
        return [box for box, _ in spec.boxes(torch.empty(stop - start))], True
    if layout == "columns":
        return [[*full[:-1], part(shape[-1], rank, world)]], True
    if layout == "grid" and len(shape) > 1 and world % 2 == 0:
        return [[part(shape[0], rank % 2, 2), *full[1:-1], part(shape[-1], rank // 2, world // 2)]], True
    return [[part(shape[0], rank, world), *full[1:]]], True


def hold(layout, rank=0, world=1, filled=False, dtype=torch.float32):
    """The slices of a rank, with their true values or with -1."""
    slices = []
    for name, shape in SHAPES.items():
        found, owner = boxes(layout, shape, rank, world)
        for box in found:
            values = whole(name, dtype)[tuple(slice(*axis) for axis in box)]  # not contiguous
            slices.append(SavedBox(name, shape, tuple(box), values if filled else torch.full_like(values, -1), owner))
    return slices


def assert_filled(slices, what=""):
    for each in slices:
        expected = whole(each.name, each.tensor.dtype)[tuple(slice(*axis) for axis in each.box)]
        assert torch.equal(each.tensor, expected), f"{what}: {each.name} {each.box} is {each.tensor}"


def names(run_dir):
    """What lies in the folder of checkpoints."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def start(world=1):
    return build_mesh(Degrees(dp=world), torch.device("cpu"))


def error_of(function, *args):
    """The one line that a UsageError says."""
    with pytest.raises(UsageError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def mesh():
    return start()


@pytest.fixture
def run_dir(tmp_path, mesh):
    """A run folder with checkpoints of steps 10 and 20, saved by one process."""
    for step in (10, 20):
        checkpoint.save(tmp_path, step, hold("replicated", filled=True), {"scale": 2.0**step}, mesh)
    return tmp_path


# ---- layouts -----------------------------------------------------------------------------------------------


def ranks_save(world, run_dir):
    mesh = start(world)
    for step, layout in enumerate(LAYOUTS):
        slices = hold(layout, mesh.rank, world, filled=True)
        checkpoint.save(run_dir, step, slices, {"layout": layout, "rank": mesh.rank}, mesh)


def ranks_load(world, paths, layouts):
    mesh = start(world)
    extras = []
    for path in paths:
        for layout in layouts:
            slices = hold(layout, mesh.rank, world)
            extras.append(checkpoint.load(path, slices, mesh))
            assert_filled(slices, f"{path} as {layout} of {world}")
    return extras


def test_every_layout_loads_into_every_other(tmp_path):
    run_ranks(2, ranks_save, 2, tmp_path)
    paths = [tmp_path / f"checkpoints/step-{step:08d}" for step in range(len(LAYOUTS))]
    into = {1: ["replicated"], 3: ["rows", "columns", "flat"], 4: ["grid", "flat", "replicated"]}
    for world, layouts in into.items():
        for extras in run_ranks(world, ranks_load, world, paths, layouts):
            expected = [{"layout": each, "rank": 0, "step": step} for step, each in enumerate(LAYOUTS)]
            assert extras == [extra for extra in expected for _ in layouts]


def test_one_process_into_several_and_back(run_dir, tmp_path, mesh):
    extras = run_ranks(3, ranks_load, 3, [checkpoint_files.newest(run_dir)], ("rows", "flat"))
    assert extras == [[{"scale": 2.0**20, "step": 20}] * 2] * 3
    run_ranks(4, ranks_save, 4, tmp_path / "four")
    for step, layout in enumerate(LAYOUTS):
        slices = hold("replicated")
        checkpoint.load(tmp_path / f"four/checkpoints/step-{step:08d}", slices, mesh)
        assert_filled(slices, layout)


def ranks_file_sizes(world, run_dir):
    mesh = start(world)
    sizes = {}
    for step, layout in enumerate(("replicated", "replicas", "rows")):
        path = checkpoint.save(run_dir, step, hold(layout, mesh.rank, world, filled=True), {}, mesh)
        sizes[layout] = [(path / f"__{rank}_0.distcp").stat().st_size for rank in range(world)]
        slices = hold("columns", mesh.rank, world)
        checkpoint.load(path, slices, mesh)
        assert_filled(slices, layout)
    return sizes


def test_who_writes_what(tmp_path):
    """Only owners write. A box with several owners is written once, and the boxes are spread over them."""
    sizes = run_ranks(2, ranks_file_sizes, 2, tmp_path)[0]
    assert sizes["replicated"][0] > 0 and sizes["replicated"][1] == 0
    assert min(sizes["replicas"]) > 0 and sum(sizes["replicas"]) < 1.1 * sum(sizes["replicated"])
    assert min(sizes["rows"]) > 0


def test_dtype_is_converted(run_dir, mesh):
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        slices = hold("columns", dtype=dtype)
        checkpoint.load(checkpoint_files.newest(run_dir), slices, mesh)
        assert {each.tensor.dtype for each in slices} == {dtype}
        assert_filled(slices)
    checkpoint.save(run_dir, 30, hold("replicated", filled=True, dtype=torch.bfloat16), {}, mesh)
    slices = hold("replicated")
    checkpoint.load(checkpoint_files.newest(run_dir), slices, mesh)
    for each in slices:
        assert torch.equal(each.tensor, whole(each.name, torch.bfloat16).float())


def test_parameters_and_padding(tmp_path, mesh):
    """Rows beyond the global shape are neither saved nor touched by a load; a larger padding fits as well."""
    parameter = nn.Parameter(torch.randn(8, 3))  # 6 rows and 2 of padding
    spec = ParameterSpec("embedding.weight", (6, 3), ((0, 8), (0, 3)), 0.02)
    path = checkpoint.save(tmp_path, 1, SavedBox.of("parameter", spec, parameter), {}, mesh)
    outside = SavedBox("parameter/embedding.weight", (6, 3), ((9, 12), (0, 3)), torch.full((3, 3), -1.0))
    wider = SavedBox("parameter/embedding.weight", (6, 3), ((4, 10), (0, 3)), nn.Parameter(torch.full((6, 3), -1.0)))
    checkpoint.load(path, [outside, wider], mesh)
    assert torch.equal(wider.tensor[:2], parameter[4:6])
    assert torch.equal(wider.tensor[2:], torch.full((4, 3), -1.0))
    assert torch.equal(outside.tensor, torch.full((3, 3), -1.0))


def test_one_rank_holds_a_tensor_twice(run_dir, mesh):
    slices = hold("replicated") + hold("replicated") + hold("rows", 0, 2)
    checkpoint.load(checkpoint_files.newest(run_dir), slices, mesh)
    assert_filled(slices)


# ---- what does not fit -------------------------------------------------------------------------------------


def test_slice_refuses_a_tensor_of_another_shape():
    with pytest.raises(ValueError, match="weight.*shape \\(2, 5\\)"):
        SavedBox("weight", (7, 5), ((0, 3), (0, 5)), torch.zeros(2, 5))


def test_tensors_that_do_not_fit(run_dir, mesh):
    path = checkpoint_files.newest(run_dir)
    other = SavedBox("parameter/other", (2,), ((0, 2),), torch.zeros(2))
    line = error_of(checkpoint.load, path, [*hold("replicated"), other], mesh)
    assert line == f"cannot load {path}: it holds no parameter/other"
    shorter = SavedBox("exp_avg/gain", (5,), ((0, 5),), torch.zeros(5))
    line = error_of(checkpoint.load, path, [shorter], mesh)
    assert line == f"cannot load {path}: exp_avg/gain has shape (6,) there and (5,) in this run"
    checkpoint.load(path, hold("replicated")[:1], mesh)  # what is there besides does not matter


def test_holes_are_not_left_unfilled(tmp_path, mesh):
    path = checkpoint.save(tmp_path, 1, hold("rows", 0, 2, filled=True), {}, mesh)
    checkpoint.load(path, hold("rows", 0, 2), mesh)
    assert "holds only a part of parameter/weight" in error_of(checkpoint.load, path, hold("replicated"), mesh)


def ranks_refused(world, run_dir):
    """Owned boxes that overlap; that leave a hole; a name that one rank alone asks for."""
    mesh = start(world)
    lines = []
    overlapping = SavedBox("gain", (4,), ((mesh.rank, mesh.rank + 2),), torch.zeros(2))
    incomplete = SavedBox("gain", (6,), ((2 * mesh.rank, 2 * mesh.rank + 2),), torch.zeros(2))
    for slices in ([overlapping], [incomplete]):
        try:
            checkpoint.save(run_dir, 1, slices, {}, mesh)
        except ValueError as error:
            lines.append(str(error))
    path = checkpoint.save(run_dir, 1, hold("rows", mesh.rank, world), {}, mesh)
    slices = hold("rows", mesh.rank, world)
    if mesh.rank == 1:
        slices[0].name = "parameter/other"
    lines.append(error_of(checkpoint.load, path, slices, mesh))
    return lines


def test_all_ranks_refuse_together(tmp_path):
    first, second = run_ranks(2, ranks_refused, 2, tmp_path)
    assert first == second
    assert len(first) == 3 and first[2].endswith("it holds no parameter/other")


# ---- files -------------------------------------------------------------------------------------------------


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


FAULTS = {
    "flipped": (flip_a_bit, "is corrupt: its SHA-256 is not that of manifest.json"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of"),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes instead of"),
    "missing": (lambda path: path.unlink(), "is missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "extra.json"])
def test_a_damaged_file_is_named(run_dir, mesh, file, fault):
    path = checkpoint_files.newest(run_dir)
    damage, message = FAULTS[fault]
    damage(path / file)
    slices = hold("replicated")
    line = error_of(checkpoint.load, path, slices, mesh)
    assert line.startswith(f"cannot load {path}: {file} ") and message in line
    assert all(torch.all(each.tensor == -1) for each in slices)  # refused before anything was loaded


def test_the_manifest(run_dir, mesh):
    path = checkpoint_files.newest(run_dir)
    manifest = path / "manifest.json"
    files = json.loads(manifest.read_text())
    assert set(files) == {each.name for each in path.iterdir()} - {"manifest.json"}
    for content in ("", "{", "[1]", '{"a": 1}', '{"a": {}}', "3"):
        manifest.write_text(content)
        assert error_of(checkpoint.load, path, [], mesh) == f"cannot load {path}: manifest.json is corrupt"
    manifest.unlink()
    assert "manifest.json is missing" in error_of(checkpoint.load, path, [], mesh)
    assert checkpoint_files.newest(run_dir).name == "step-00000010"


def ranks_meet_damage(world, run_dir):
    mesh = start(world)
    path = checkpoint.save(run_dir, 5, hold("rows", mesh.rank, world, filled=True), {}, mesh)
    lines = []
    for rank in range(world):
        file = path / f"__{rank}_0.distcp"
        content = file.read_bytes()
        torch.distributed.barrier()
        if mesh.rank == 0:
            flip_a_bit(file)
        torch.distributed.barrier()
        lines.append(error_of(checkpoint.load, path, hold("rows", mesh.rank, world), mesh))
        torch.distributed.barrier()
        if mesh.rank == 0:
            file.write_bytes(content)
    torch.distributed.barrier()
    checkpoint.load(path, hold("rows", mesh.rank, world), mesh)
    for most, size in ((200, 10), (100_000, 200_000)):  # less and more than what is buffered before it is written
        if mesh.rank == 1:  # as if the disk were full: no file of this process may grow beyond so many bytes
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        large = SavedBox("large", (world, size), ((mesh.rank, mesh.rank + 1), (0, size)), torch.zeros(1, size))
        lines.append(error_of(checkpoint.save, run_dir, 6, [large], {}, mesh))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return lines


def test_all_ranks_raise_the_same(tmp_path):
    first, *others = run_ranks(3, ranks_meet_damage, 3, tmp_path)
    assert others == [first] * 2
    for rank, line in enumerate(first[:3]):
        assert f"__{rank}_0.distcp is corrupt" in line
    for line in first[3:]:
        assert line.startswith("cannot save") and line.endswith("File too large")
    assert checkpoint_files.newest(tmp_path).name == "step-00000005"


class Died(BaseException):
    pass


@pytest.mark.parametrize("where", ["files._write", "boxes.write", "files._sha256", "files._flush"])
@pytest.mark.parametrize("step", [20, 30])
def test_dying_half_way_leaves_the_one_before(run_dir, mesh, monkeypatch, where, step):
    def die(*args):
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(f"common.checkpoints.checkpoint.{where}", die)
        with pytest.raises(Died):
            checkpoint.save(run_dir, step, hold("replicated"), {}, mesh, keep=1)
    assert (run_dir / f"checkpoints/step-{step:08d}.tmp").exists()
    slices = hold("replicated")
    assert checkpoint.load(checkpoint_files.newest(run_dir), slices, mesh)["step"] == 20
    assert_filled(slices)  # the one of step 20 is untouched, also by an attempt to save step 20 again
    assert names(run_dir)[:2] == ["step-00000010", "step-00000020"], "older ones go when the new one is complete"

    checkpoint.save(run_dir, 40, hold("replicated", filled=True), {}, mesh)
    assert names(run_dir) == ["step-00000010", "step-00000020", "step-00000040"]


def test_saving_a_step_again_replaces_it(run_dir, mesh):
    checkpoint.save(run_dir, 20, hold("replicated", filled=True), {"again": True}, mesh)
    assert checkpoint.load(checkpoint_files.newest(run_dir), hold("replicated"), mesh)["again"]
    assert len(names(run_dir)) == 2


def test_keep_lets_go_of_the_oldest(run_dir, mesh, monkeypatch):
    for step, keep, left in [(30, 4, "10 20 30"), (40, 3, "20 30 40"), (40, 2, "30 40"), (50, 0, "30 40 50")]:
        checkpoint.save(run_dir, step, hold("replicated", filled=True), {}, mesh, keep)
        assert names(run_dir) == [f"step-000000{each}" for each in left.split()]

    def die(path, **options):
        if path.exists():
            raise Died

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(Died):
            checkpoint.save(run_dir, 60, hold("replicated", filled=True), {}, mesh, keep=1)
    assert checkpoint_files.newest(run_dir).name == "step-00000060" and "step-00000050.tmp" in names(run_dir)
    checkpoint.save(run_dir, 70, hold("replicated", filled=True), {}, mesh, keep=1)
    assert names(run_dir) == ["step-00000070"]
    checkpoint.load(checkpoint_files.newest(run_dir), hold("replicated"), mesh)


def test_run_folder_that_cannot_be_written(tmp_path, mesh):
    (tmp_path / "file").write_text("")
    assert "cannot save" in error_of(checkpoint.save, tmp_path / "file", 1, [], {}, mesh)


# ---- in the background -------------------------------------------------------------------------------------


@contextmanager
def slow_writer():
    """Every file of a checkpoint waits to be written until the event that this yields is set."""
    import torch.distributed.checkpoint as dcp

    gate, write_data = threading.Event(), dcp.FileSystemWriter.write_data

    def wait_and_write(*args):
        assert gate.wait(60), "nobody opened the gate"
        return write_data(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, "write_data", wait_and_write)
        yield gate


def ranks_save_in_background(world, run_dir):
    """Updates and collectives go on while files are written; what is saved is what was there at the call."""
    mesh = start(world)
    saves = checkpoint.BackgroundSaves(mesh, timeout=60)
    slices = hold("rows", mesh.rank, world, filled=True)
    with slow_writer() as gate:
        saves.save(run_dir, 10, slices, {"scale": 0.5}, keep=1)
        for each in slices:
            each.tensor.zero_()
        total = torch.ones(1)
        for _ in range(5):  # the ranks reach the background's collectives at different moments between these
            collectives.all_reduce(total, mesh.world)
        during = checkpoint_files.newest(run_dir)
        gate.set()
        # Waits for the other. Two are kept: the load below is not to lose what it reads
        saves.save(run_dir, 20, hold("columns", mesh.rank, world, filled=True), {}, keep=2)
        seen = hold("flat", mesh.rank, world)
        extra = checkpoint.load(checkpoint_files.folder_of(run_dir, 10), seen, mesh)
        assert_filled(seen, "step 10")
        saves.wait()
    saves.wait()
    seen = hold("grid", mesh.rank, world)
    checkpoint.load(checkpoint_files.newest(run_dir), seen, mesh)
    assert_filled(seen, "step 20")
    saves.save(run_dir, 21, slices, {}, keep=1)
    saves.wait()
    left = names(run_dir)
    collectives.barrier(mesh.world)  # all have looked before the next one is begun
    if mesh.rank == world - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
    saves.save(run_dir, 30, hold("rows", mesh.rank, world), {})
    line = error_of(saves.wait)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {"during": during, "extra": extra, "total": total.item(), "left": left, "line": line}


def test_save_in_the_background(tmp_path):
    for world in (1, 3):
        run_dir = tmp_path / str(world)
        first, *others = run_ranks(world, ranks_save_in_background, world, run_dir)
        assert others == [first] * (world - 1)
        assert first["during"] is None and first["extra"] == {"scale": 0.5, "step": 10}
        assert first["total"] == world**5 and first["left"] == ["step-00000021"]
        assert first["line"].startswith(f"cannot save {run_dir}") and first["line"].endswith("File too large")
        assert checkpoint_files.newest(run_dir).name == "step-00000021"


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_on_a_terminal(tmp_path, mesh, monkeypatch, terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    saves = checkpoint.BackgroundSaves(mesh)
    saves.save(tmp_path, 10, hold("replicated", filled=True), {})
    saves.wait()
    assert ("step-00000010:" in stream.getvalue()) == terminal and terminal == bool(stream.getvalue())


# ---- resuming ----------------------------------------------------------------------------------------------


def test_newest_and_candidates(run_dir, tmp_path_factory):
    candidates, newest = checkpoint_files.candidates, checkpoint_files.newest
    checkpoints, empty = run_dir / "checkpoints", tmp_path_factory.mktemp("empty")
    first, last = checkpoints / "step-00000010", checkpoints / "step-00000020"
    for name in ("step-00000030", "step-00000040.tmp", "step-00000050.damaged", "step-later", "other"):
        (checkpoints / name).mkdir()
        if name != "step-00000030":  # which has no manifest
            (checkpoints / name / "manifest.json").write_text("{}")
    assert candidates("auto", run_dir) == [last, first] and newest(run_dir) == last
    assert candidates("auto", empty) == candidates("auto", None) == [] and newest(empty) is None
    assert newest(empty / "nothing") is None
    assert candidates(str(run_dir), None) == [last], "a path means one checkpoint"
    assert candidates(str(first), run_dir) == [first]
    assert "no such folder" in error_of(candidates, str(run_dir / "nothing"), None)
    for path in (empty, checkpoints / "step-00000030"):
        assert error_of(candidates, str(path), None).startswith(f"--resume {path}: no complete checkpoint")
    for name in ("step-20000000", "step-100000000"):  # by number, not by name
        (checkpoints / name).mkdir()
        (checkpoints / name / "manifest.json").write_text("{}")
    assert newest(run_dir).name == "step-100000000"


DAMAGE = {"__0_0.distcp": "flipped", ".metadata": "truncated", "extra.json": "empty"}
DAMAGE |= {"manifest.json": "truncated", "__1_0.distcp": "missing"}


def ranks_load_intact(world, run_dir):
    mesh = start(world)
    outcomes = []
    for file, fault in DAMAGE.items():
        step = 10 * (2 + len(outcomes))
        path = checkpoint.save(run_dir, step, hold("rows", mesh.rank, world, filled=True), {}, mesh)
        if mesh.rank == 0:
            FAULTS[fault][0](path / file)
        collectives.barrier(mesh.world)
        slices = hold("flat", mesh.rank, world)
        found = checkpoint_files.candidates("auto", run_dir)
        collectives.barrier(mesh.world)  # all have looked before one is renamed
        folder, extra = checkpoint.load_intact(found, slices, mesh)
        assert_filled(slices, f"after {file} was {fault}")
        outcomes.append((folder.name, extra["step"]))
    return outcomes


def test_a_damaged_one_gives_way_to_the_one_before(tmp_path, mesh, capsys):
    checkpoint.save(tmp_path, 10, hold("replicated", filled=True), {}, mesh)
    for outcomes in run_ranks(2, ranks_load_intact, 2, tmp_path):
        assert outcomes == [("step-00000010", 10)] * len(DAMAGE)
    lines = [line for line in capsys.readouterr().out.splitlines() if "cannot load" in line]
    assert len(lines) == len(DAMAGE) and all(line.startswith("[rank 0]") for line in lines)
    for number, (line, file) in enumerate(zip(lines, DAMAGE)):
        name = f"step-000000{20 + 10 * number}"
        assert f"checkpoints/{name}: {file} " in line
        assert line.endswith(f"; renamed to {name}.damaged, going on from step-00000010")
    assert names(tmp_path) == ["step-00000010", *(f"step-000000{step}.damaged" for step in (20, 30, 40, 50, 60))]


def test_all_damaged(run_dir, mesh):
    """A later run may damage its checkpoint of the same step; when nothing is left, nothing is renamed."""
    (run_dir / "checkpoints/step-00000020.damaged").mkdir()
    flip_a_bit(run_dir / "checkpoints/step-00000020/extra.json")
    checkpoint.load_intact(checkpoint_files.candidates("auto", run_dir), hold("replicated"), mesh)
    before = ["step-00000010", "step-00000020.damaged", "step-00000020.damaged-2"]
    assert names(run_dir) == before
    flip_a_bit(run_dir / "checkpoints/step-00000010/extra.json")
    checkpoint.save(run_dir, 20, hold("replicated"), {}, mesh)
    (run_dir / "checkpoints/step-00000020/manifest.json").write_text("{")
    line = error_of(checkpoint.load_intact, checkpoint_files.candidates("auto", run_dir), hold("replicated"), mesh)
    assert "step-00000020: manifest.json is corrupt; cannot load" in line and "step-00000010: extra.json is" in line
    assert names(run_dir) == sorted([*before, "step-00000020"])


def ranks_see_different_things(run_dir):
    """Rank 1 sees the storage of a moment ago; a rank that cannot see the files never makes them damaged."""
    mesh = start(2)
    look = checkpoint_files.candidates if mesh.rank == 0 else lambda *args: []
    found = checkpoint.from_rank_0(mesh, lambda: look("auto", run_dir))
    checkpoint.load_intact(found, hold("rows", mesh.rank, 2), mesh)
    here = found if mesh.rank == 0 else [run_dir / "elsewhere"]
    return found, error_of(checkpoint.load_intact, here, hold("rows", mesh.rank, 2), mesh)


def test_ranks_agree_although_they_see_different_things(run_dir):
    for found, line in run_ranks(2, ranks_see_different_things, run_dir):
        assert [folder.name for folder in found] == ["step-00000020", "step-00000010"]
        assert line.endswith("the ranks see different files there; all must share the storage of --run-dir")
    assert names(run_dir) == ["step-00000010", "step-00000020"]


def test_check_compatible():
    saved = json.loads(json.dumps({"hidden": 64, "axes": (1, 2), "lr": 1e-3, "corpus": "a", "gone": None}))
    checkpoint.check_compatible(saved, {"hidden": 64, "axes": (1, 2), "lr": 1e-3, "corpus": "a"})
    line = error_of(checkpoint.check_compatible, saved, {**saved, "hidden": 128, "corpus": "b"})
    assert line == (
        "cannot resume: corpus is a in the checkpoint and b in this run; "
        "hidden is 64 in the checkpoint and 128 in this run"
    )


def test_no_warning_and_exact_numbers(tmp_path, mesh):
    numbers = {"third": 1 / 3, "large": 2.0**1000, "names": ["a", None, True]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = checkpoint.save(tmp_path, 7, hold("replicated", filled=True), numbers, mesh)
        assert checkpoint.load(path, hold("replicated"), mesh) == {**numbers, "step": 7}


def test_the_library_is_imported_late():
    code = "import common.checkpoints.checkpoint, sys; sys.exit('torch.distributed.checkpoint' in sys.modules)"
    assert run_command([sys.executable, "-c", code]).returncode == 0
