"""Checkpoints and Hugging Face weights across pipelines: other schedules, other layouts, one process, and back."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import safetensors
import torch.distributed.checkpoint  # noqa: F401, so that the fork server imports it once for all ranks
from safetensors.torch import load_file

from common import export
from common.huggingface import huggingface_name
from tests.harness.ranks import run_ranks
from tests.parity.runs import SMALL, Result, run_in_folders, together, train_here
from tests.unit.test_huggingface import Reads

STEPS, FROM = 4, 2
BASE = f"{SMALL} --layers 4 --steps {STEPS} --micro-batch 3 --optimizer adamw --clip 0.5 --peak-tflops 1"
TYING = {"untied": "--no-tie-embeddings", "tied": "--tie-embeddings"}
SAVED_BY = {"untied": "--pp 2 --schedule 1f1b", "tied": "--pp 2 --schedule dualpipe"}
CHECKPOINT = f"checkpoints/step-{FROM:08d}"


def run(world: int, cases: dict[Path, str], step: int = 5) -> list[Result]:
    return run_in_folders(world, step, {folder: f"{BASE} {flags}" for folder, flags in cases.items()})


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    return {name: root / name.replace(" ", "-") for name in ("untied", "tied", "untied by one", "tied by one")}


@pytest.fixture(scope="module")
def undisturbed(folders) -> dict[str, Result]:
    """Trained to the end with checkpoints on the way: by pipelines, and by one process with step 1."""
    saving = f"--save-every {FROM}"
    names = list(TYING)
    pipelines = run(2, {folders[name]: f"{TYING[name]} {SAVED_BY[name]} {saving}" for name in names})
    alone = run(1, {folders[f"{name} by one"]: f"{TYING[name]} {saving}" for name in names}, step=1)
    return dict(zip((*names, *(f"{name} by one" for name in names)), pipelines + alone, strict=True))


def assert_goes_on(result: Result, expected: Result, case: str) -> None:
    """The same curve and the same model at the end; so the same gradients right after the checkpoint."""
    assert len(result.losses) == STEPS - FROM, case
    np.testing.assert_allclose(result.losses, expected.losses[FROM:], rtol=1e-13, err_msg=case)
    np.testing.assert_allclose(result.norms, expected.norms[FROM:], rtol=1e-12, err_msg=case)
    assert result.parameters.keys() == expected.parameters.keys(), case
    for name, theirs in expected.parameters.items():
        difference = np.linalg.norm(result.parameters[name] - theirs) / np.linalg.norm(theirs)
        assert difference < 1e-12, f"{case}: {name} {difference}"


RESUMED = {  # ranks: (which checkpoint, layout)
    2: [
        ("untied", "--pp 2 --schedule zbv"),
        ("untied", "--dp 2 --zero 3"),
        ("untied", "--tp 2"),
        ("untied", "--pp 2 --schedule dualpipe --recompute full"),
        ("tied", "--pp 2 --schedule 1f1b"),
        ("tied", "--pp 2 --schedule zbv --recompute full"),
        ("tied", "--dp 2 --zero 2"),
        ("untied by one", "--pp 2 --schedule interleaved"),
        ("tied by one", "--pp 2 --schedule dualpipe"),
        ("tied by one", "--pp 2 --schedule zb-h2"),
    ],
    4: [
        ("untied", "--pp 2 --dp 2 --zero 3 --schedule zbv"),
        ("tied", "--pp 2 --dp 2 --zero 1 --schedule dualpipe"),
        ("tied", "--pp 2 --tp 2 --zero 1 --schedule 1f1b"),
    ],
}


@pytest.mark.parametrize("world", RESUMED)
def test_resume_in_another_layout(world, folders, undisturbed, tmp_path):
    cases = {}
    for number, (name, layout) in enumerate(RESUMED[world]):
        tying = TYING[name.split()[0]]
        cases[tmp_path / str(number)] = f"{tying} {layout} --resume {folders[name] / CHECKPOINT}"
    for (name, layout), result in zip(RESUMED[world], run(world, cases), strict=True):
        assert_goes_on(result, undisturbed[name], f"{name}, on {world} ranks with {layout}")


@pytest.mark.parametrize("name", TYING)
def test_step_1_goes_on(name, folders, undisturbed, tmp_path):
    """It knows nothing of pipelines."""
    [result] = run(1, {tmp_path: f"{TYING[name]} --resume {folders[name] / CHECKPOINT}"}, step=1)
    assert_goes_on(result, undisturbed[name], name)


def resumed_twice(cases: list[str]) -> None:
    """Three starts in one folder: to step 2, on to 3, on to the end."""
    for layout, steps in zip(cases, (FROM, 3, STEPS), strict=True):
        train_here(5, f"{BASE} {layout} --steps {steps} --save-every 1 --resume auto")


def test_resume_auto(undisturbed, tmp_path):
    """One folder, another schedule at every start; the record is that of one run."""
    names = ["1f1b", "zbv", "interleaved"]
    cases = [f"{TYING['untied']} --pp 2 --schedule {name} --run-dir {tmp_path}" for name in names]
    run_ranks(2, resumed_twice, cases)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert [line["loss"] for line in lines] == pytest.approx(undisturbed["untied"].losses, rel=1e-13)
    assert [line["grad_norm"] for line in lines] == pytest.approx(undisturbed["untied"].norms, rel=1e-12)


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(folders, undisturbed, tmp_path_factory) -> dict[str, Path]:
    """The last checkpoints of the pipelines as `python -m common.export` writes them."""
    root = tmp_path_factory.mktemp("exported")
    for name in TYING:
        assert export.main([str(folders[name]), str(root / name)]) == 0
    return {name: root / name for name in TYING}


@pytest.mark.parametrize("name", TYING)
def test_export_of_a_pipeline(name, exported, undisturbed):
    """Bit for bit what the ranks own, and the same model as one process trains."""
    written = load_file(exported[name] / "model.safetensors")
    expected = {huggingface_name(key): values for key, values in undisturbed[name].parameters.items()}
    assert written.keys() == expected.keys()
    for key, values in expected.items():
        assert np.array_equal(written[key].numpy(), values), key
    for key, values in undisturbed[f"{name} by one"].parameters.items():
        np.testing.assert_allclose(undisturbed[name].parameters[key], values, rtol=0, atol=1e-12, err_msg=key)


def reading(cases: list[str]) -> list[tuple]:
    """Train each case; what this rank has owned, and the names of the weights that it read."""
    found = []
    for flags in cases:
        Reads.elements = {}
        with mock.patch.object(safetensors, "safe_open", Reads):
            boxes = train_here(5, f"{BASE} {flags}")
        found.append((boxes, set(Reads.elements)))
    return found


def test_every_rank_reads_only_its_stages(exported, undisturbed, tmp_path):
    starts = {name: f"{TYING[name]} --init-from {exported[name]} --steps 1" for name in TYING}
    cases = {  # and the layers of each rank
        "1f1b": (f"{starts['untied']} --pp 2", [{0, 1}, {2, 3}]),
        "interleaved": (f"{starts['tied']} --pp 2 --schedule interleaved", [{0, 2}, {1, 3}]),
        "dualpipe": (f"{starts['tied']} --pp 2 --schedule dualpipe", [{0, 1, 2, 3}] * 2),
    }
    ranks = run_ranks(2, reading, [f"{flags} --run-dir {tmp_path / name}" for name, (flags, _) in cases.items()])
    for index, (name, (flags, layers)) in enumerate(cases.items()):
        divided = together(tmp_path / name, [rank[index][0] for rank in ranks])
        tying = "untied" if starts["untied"] in flags else "tied"
        [alone] = run(1, {tmp_path / f"{name}-one": starts[tying]}, step=1)
        assert divided.losses == pytest.approx(alone.losses, rel=1e-14), "the first loss, before any update"
        assert divided.norms == pytest.approx(alone.norms, rel=1e-12)
        for rank in range(2):
            expected = {f"layers.{layer}." for layer in layers[rank]}
            of_layers = {key for key in undisturbed[tying].parameters if key.startswith(tuple(expected))}
            first, last = 0 in layers[rank], 3 in layers[rank]
            ends = {"embedding.weight"} if first or (last and tying == "tied") else set()
            ends |= {"norm.weight"} if last else set()
            ends |= {"head.weight"} if last and tying == "untied" else set()
            assert ranks[rank][index][1] == {huggingface_name(key) for key in of_layers | ends}, (name, rank)
