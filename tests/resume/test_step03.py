"""A checkpoint of any layout goes on in any other, bit for bit; Hugging Face weights are read into shards."""

import importlib
import json
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import safetensors
import torch
import torch.distributed.checkpoint  # noqa: F401, so that the fork server imports it once for all ranks
from safetensors.torch import load_file

from common import export
from common.command_line import STEP_NAMES, parse
from common.huggingface import huggingface_name
from common.model import Decoder
from common.process_groups import Degrees, build_mesh, environment
from step01_single_gpu.mixed_precision import Optimizer
from step03_zero.zero import Zero
from tests.harness.ranks import run_ranks
from tests.parity.runs import SMALL, TOLERANCE, assemble, assert_parity, reference, run_cases, train_here
from tests.parity.test_step03_precision import NORM_TOLERANCE
from tests.unit.test_huggingface import Reads

TRAINING = "--optimizer adamw --lr 1e-3 --clip 0.5 --no-tie-embeddings"
SAVED, END = 3, 6  # steps before the checkpoint, and in all
LAYOUTS = {  # name: (ranks, step, flags)
    "step 1": (1, 1, "--micro-batch 4"),
    "dp on 2": (2, 2, "--bucket-mb 0.02"),
    "zero 1 on 2": (2, 3, "--zero 1 --bucket-mb 0.02"),
    "zero 2 on 2": (2, 3, "--zero 2"),
    "zero 3 on 2": (2, 3, "--zero 3"),
    "zero 1 on 3": (3, 3, "--zero 1 --bucket-mb 0.02"),
    "zero 2 on 3": (3, 3, "--zero 2 --zero-reduce step --bucket-mb 0.02"),
    "zero 3 on 3": (3, 3, "--zero 3 --recompute full"),
    "zero 3, two copies on 4": (4, 3, "--zero 3 --zero-replicas 2"),
}


def state_of(optimizer: Optimizer) -> list[tuple]:
    """Master weights and moments as this rank holds them: name, whole shape, box, values, whether it owns them."""
    slices = optimizer.slices()
    return [(s.name, s.global_shape, s.box, s.tensor.detach().double().numpy().copy(), s.owner) for s in slices]


def train_and_look(step: int, flags: str) -> dict:
    """Train; the curve (rank 0), the optimizer's state right after loading, if it was loaded, and at the end."""
    module, found, made = importlib.import_module(f"{STEP_NAMES[step - 1]}.train"), {}, []
    initialise, loaded = Optimizer.__init__, Optimizer.loaded

    def keep(self, *arguments):
        made.append(self)
        initialise(self, *arguments)

    def look(self, updates):
        loaded(self, updates)
        found["loaded"] = state_of(self)

    config = parse(step, [*SMALL.split(), *TRAINING.split(), *flags.split(), "--peak-tflops", "1"])
    config.resolve_and_check(environment().world_size)
    mesh = build_mesh(Degrees.of(config), torch.device("cpu"), config.model_config.kv_heads)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Optimizer, "__init__", keep))
        stack.enter_context(mock.patch.object(Optimizer, "loaded", look))
        module.train(config, mesh)
    if mesh.rank == 0:
        lines = map(json.loads, Path(config.run_dir, "metrics.jsonl").read_text().splitlines())
        found["curve"] = [(line["step"], line["loss"], line["grad_norm"]) for line in lines]
    return found | {"end": state_of(made[-1])}


def look_at_all(jobs: list[tuple[int, str]]) -> list[dict]:
    return [train_and_look(step, flags) for step, flags in jobs]


def run_jobs(jobs: dict[object, tuple[str, str]]) -> dict[object, list[dict]]:
    """What every rank found in each job (layout, flags), by the job's name; the jobs of a world run in one start."""
    found = {}
    for world in range(1, 5):
        mine = {name: job for name, job in jobs.items() if LAYOUTS[job[0]][0] == world}
        if mine:
            arguments = [(LAYOUTS[layout][1], f"{LAYOUTS[layout][2]} {flags}") for layout, flags in mine.values()]
            ranks = run_ranks(world, look_at_all, arguments, timeout=300)
            found |= dict(zip(mine, zip(*ranks, strict=True), strict=True))
    return found


def whole(ranks: list[dict], moment: str) -> dict[str, np.ndarray]:
    """The state of all ranks put together; every element must be owned once."""
    parts = [{"curve": [(0, 0)], "boxes": [each[:4] for each in rank[moment] if each[4]]} for rank in ranks]
    return assemble(parts).parameters


def assert_loaded(ranks: list[dict], saved: dict[str, np.ndarray], case: str) -> None:
    """Every rank, owner or not, has the saved values, bit for bit, and together they have all of them."""
    for rank in ranks:
        for name, _, box, values, _ in rank["loaded"]:
            assert np.array_equal(values, saved[name][tuple(slice(*axis) for axis in box)]), f"{case}: {name} {box}"
    assert whole(ranks, "loaded").keys() == saved.keys(), case


def matrix(layouts: list[str], distances: tuple[int, ...]) -> list[tuple[str, str]]:
    """Pairs (source, target): every layout is as often the one as the other."""
    count = len(layouts)
    return [(layouts[i], layouts[(i + distance) % count]) for i in range(count) for distance in distances]


def save_and_resume(folder: Path, flags: str, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], list[dict]]:
    """Train `SAVED` steps in every source layout, and on from there in every target. Checks what was loaded."""
    sources = dict.fromkeys(source for source, _ in pairs)
    steps = f"{flags} --steps {SAVED} --save-every {SAVED} --run-dir {folder}"
    saved = run_jobs({name: (name, f"{steps}/{name.replace(' ', '-')}") for name in sources})
    states = {name: whole(ranks, "end") for name, ranks in saved.items()}
    jobs = {}
    for index, (source, target) in enumerate(pairs):
        resume = f"--resume {folder}/{source.replace(' ', '-')} --run-dir {folder}/resumed-{index}"
        jobs[source, target] = target, f"{flags} --steps {END} {resume}"
    resumed = run_jobs(jobs)
    for (source, target), ranks in resumed.items():
        assert_loaded(ranks, states[source], f"{source} into {target}")
        assert [step for step, *_ in ranks[0]["curve"]] == list(range(SAVED, END))
    return resumed


def assert_goes_on(ranks: list[dict], expected, tolerance: float, case: str) -> None:
    """The steps after the checkpoint are those of the undisturbed run."""
    for step, loss, norm in ranks[0]["curve"]:
        assert loss == pytest.approx(expected.losses[step], rel=tolerance), f"{case}: loss of step {step}"
        assert norm == pytest.approx(expected.norms[step], rel=tolerance), f"{case}: gradient norm of step {step}"


def test_every_layout_into_every_kind_of_layout(tmp_path):
    pairs = matrix(list(LAYOUTS), (1, 4, 6))
    assert {target for _, target in pairs} == {source for source, _ in pairs} == LAYOUTS.keys()
    expected = reference(f"{TRAINING} --steps {END}")
    for (source, target), ranks in save_and_resume(tmp_path, "", pairs).items():
        case = f"{source} into {target}"
        assert_goes_on(ranks, expected, TOLERANCE, case)
        end = whole(ranks, "end")
        for name, value in expected.parameters.items():
            difference = np.linalg.norm(end[f"parameter/{name}"] - value) / np.linalg.norm(value)
            assert difference < TOLERANCE, f"{case}: {name}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_narrow_types_keep_their_float32_masters(tmp_path, dtype):
    layouts = ["step 1", "zero 1 on 3", "zero 3, two copies on 4", "zero 3 on 2"]
    flags = f"--dtype {dtype} --micro-batch 1"  # of one sample, so that each is rounded alike in every layout
    expected = reference(f"{TRAINING} --steps {END} --dtype {dtype}")
    for (source, target), ranks in save_and_resume(tmp_path, flags, matrix(layouts, (1,))).items():
        assert_goes_on(ranks, expected, NORM_TOLERANCE, f"{source} into {target}")


def test_master_weights_go_on_in_another_type(tmp_path):
    """What a bfloat16 run saves is float32, and a float32 run goes on from just that; and back."""
    states = {}
    for index, (dtype, source, target) in enumerate(
        [
            ("bfloat16", None, "zero 3 on 3"),
            ("float32", "zero 3 on 3", "zero 1 on 2"),
            ("bfloat16", "zero 1 on 2", "dp on 2"),
        ]
    ):
        resume = f"--resume {tmp_path}/{index - 1}" if source else ""
        flags = f"--dtype {dtype} --steps {index + 1} --save-every 1 --run-dir {tmp_path}/{index} {resume}"
        ranks = run_jobs({target: (target, flags)})[target]
        if source:
            assert_loaded(ranks, states[source], f"{source} into {target}")
        states[target] = whole(ranks, "end")
        narrow = torch.tensor(states[target]["parameter/head.weight"]).bfloat16().double().numpy()
        assert not np.array_equal(narrow, states[target]["parameter/head.weight"]), "more than bfloat16 holds"


# ---- Hugging Face weights --------------------------------------------------------------------------------------------


def shards_from(folder: Path) -> tuple[list[tuple], int]:
    """This rank's shards of stage 3 as read from `folder`, and how many elements were read for them."""
    flags = f"--zero 3 --init-from {folder}"
    config = parse(3, [*SMALL.split(), *TRAINING.split(), *flags.split()])
    config.resolve_and_check(environment().world_size)
    mesh = build_mesh(Degrees.of(config), torch.device("cpu"))
    Reads.elements = {}
    with mock.patch.object(safetensors, "safe_open", Reads):
        zero = Zero(Decoder(config.model_config), config, mesh)
    shards = [(shard.spec.name, shard.spec.flat_range, shard.numpy().copy()) for shard in zero.shards]
    return shards, sum(Reads.elements.values())


def test_hugging_face_weights_are_read_piece_by_piece(tmp_path):
    train_here(1, f"{SMALL} {TRAINING} --seed 11 --steps 1 --save-every 1 --run-dir {tmp_path / 'run'}")
    assert export.main([str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    written, found = load_file(tmp_path / "hf/model.safetensors"), 0
    model = Decoder(parse(1, [*SMALL.split(), *TRAINING.split()]).model_config)
    weights = {p.spec.name: written[huggingface_name(p.spec.name)].flatten().numpy() for p in model.parameters()}
    total = sum(map(len, weights.values()))
    for shards, elements_read in run_ranks(3, shards_from, tmp_path / "hf"):
        for name, piece, values in shards:
            assert np.array_equal(values, weights[name][slice(*piece)]), name
            found += len(values)
        assert elements_read == sum(len(values) for _, _, values in shards) < 0.34 * total, "its own and no more"
    assert found == total

    flags = f"{TRAINING} --steps 4 --init-from {tmp_path / 'hf'}"
    (result,) = run_cases(3, 3, [f"{flags} --zero 3"])
    assert_parity(result, reference(flags), "from Hugging Face weights")
