"""Checkpoints and Hugging Face weights across changes of the tensor-parallel layout."""

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

STEPS, FROM = 5, 2
BASE = f"{SMALL} --steps {STEPS} --micro-batch 3 --optimizer adamw --clip 0.5 --vocab 257 --peak-tflops 1"
# On 2 ranks the vocabulary has one row of padding, on 4 it has three; 4 ranks share 2 K/V heads
UNTIED, TIED = "--no-tie-embeddings", "--tie-embeddings"
TP2, TP4 = "--tp 2 --zero 1", "--tp 4 --no-sequence-parallel --tp-mode plain"


def run(world: int, cases: dict[Path, str]) -> list[Result]:
    return run_in_folders(world, 4, {folder: f"{BASE} {flags}" for folder, flags in cases.items()})


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    return {"untied": root / "untied", "tied": root / "tied"}


@pytest.fixture(scope="module")
def undisturbed(folders) -> dict[str, Result]:
    """Trained to the end, with checkpoints on the way: by 2 ranks, and by 4 that share K/V heads."""
    saving = f"--save-every {FROM}"
    [untied] = run(2, {folders["untied"]: f"{UNTIED} {TP2} {saving}"})
    [tied] = run(4, {folders["tied"]: f"{TIED} {TP4} {saving}"})
    return {"untied": untied, "tied": tied}


def assert_goes_on(result: Result, expected: Result, case: str) -> None:
    assert len(result.losses) == STEPS - FROM, case
    np.testing.assert_allclose(result.losses, expected.losses[FROM:], rtol=1e-13, err_msg=case)
    np.testing.assert_allclose(result.norms, expected.norms[FROM:], rtol=1e-12, err_msg=case)
    for name, theirs in expected.parameters.items():
        difference = np.linalg.norm(result.parameters[name] - theirs) / np.linalg.norm(theirs)
        assert difference < 1e-12, f"{case}: {name} {difference}"


RESUMED = [  # saved by 2 ranks (untied) or 4 (tied), resumed in these layouts
    (1, {"untied": "--zero 1", "tied": ""}),
    (2, {"tied": TP2}),
    (4, {"untied": "--tp 4"}),
    (4, {"untied": "--tp 2 --dp 2 --zero 3 --recompute full", "tied": "--tp 2 --zero 2 --tp-mode chunked"}),
]


@pytest.mark.parametrize("world, layouts", RESUMED)
def test_resume_in_another_layout(world, layouts, folders, undisturbed, tmp_path):
    cases, tying = {}, {"untied": UNTIED, "tied": TIED}
    for name, layout in layouts.items():
        checkpoint = folders[name] / f"checkpoints/step-{FROM:08d}"
        cases[tmp_path / name] = f"{tying[name]} {layout} --resume {checkpoint}"
    for name, result in zip(layouts, run(world, cases), strict=True):
        assert_goes_on(result, undisturbed[name], f"{name} on {world} ranks, {layouts[name]}")


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_step_1_goes_on(name, folders, undisturbed, tmp_path):
    """It knows nothing of tensor parallelism."""
    checkpoint = folders[name] / f"checkpoints/step-{FROM:08d}"
    tying = {"untied": UNTIED, "tied": TIED}[name]
    boxes = train_here(1, f"{BASE} {tying} --resume {checkpoint} --run-dir {tmp_path}")
    assert_goes_on(together(tmp_path, [boxes]), undisturbed[name], name)


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(folders, undisturbed, tmp_path_factory) -> dict[str, Path]:
    """The last checkpoints as `python -m common.export` writes them."""
    root = tmp_path_factory.mktemp("exported")
    for name, folder in folders.items():
        assert export.main([str(folder), str(root / name)]) == 0
    return {name: root / name for name in folders}


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_export_of_a_divided_model(name, exported, undisturbed):
    """Bit for bit, and nothing of the padding."""
    written = load_file(exported[name] / "model.safetensors")
    expected = {huggingface_name(key): values for key, values in undisturbed[name].parameters.items()}
    assert written.keys() == expected.keys()
    for key, values in expected.items():
        assert np.array_equal(written[key].numpy(), values), key


def reading(cases: list[str]) -> list[tuple]:
    """Train each case; what this rank has owned, and how many elements of every weight it read."""
    found = []
    for flags in cases:
        Reads.elements = {}
        with mock.patch.object(safetensors, "safe_open", Reads):
            boxes = train_here(4, f"{BASE} {flags}")
        found.append((boxes, dict(Reads.elements)))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_reads_only_its_slices(world, exported, undisturbed, tmp_path):
    names = list(exported)
    tying = {"untied": UNTIED, "tied": TIED}
    starts = {name: f"{tying[name]} --init-from {exported[name]} --steps 1" for name in names}
    cases = [f"{starts[name]} --tp {world} --run-dir {tmp_path / name}" for name in names]
    ranks = run_ranks(world, reading, cases)
    for index, name in enumerate(names):
        divided = together(tmp_path / name, [rank[index][0] for rank in ranks])
        train_here(1, f"{BASE} {starts[name]} --run-dir {tmp_path / 'one'}-{name}")
        alone = json.loads((tmp_path / f"one-{name}/metrics.jsonl").read_text())
        assert divided.losses == pytest.approx([alone["loss"]], rel=1e-14), "the first loss, before any update"
        assert divided.norms == pytest.approx([alone["grad_norm"]], rel=1e-12)
        for key, values in undisturbed[name].parameters.items():
            read = [rank[index][1].get(huggingface_name(key), 0) for rank in ranks]
            rows = -(-257 // world)
            if key in ("embedding.weight", "head.weight"):
                expected = [(min(rows * (rank + 1), 257) - rows * rank) * 32 for rank in range(world)]
            elif key.endswith("norm.weight"):
                expected = [values.size] * world
            else:  # of the 2 K/V heads, 4 ranks read one each
                ways = 2 if "k_proj" in key or "v_proj" in key else world
                expected = [values.size // ways] * world
            assert read == expected, (name, key)
