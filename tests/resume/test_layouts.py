"""A checkpoint of any layout goes on in any other, bit for bit; Hugging Face weights are written and read by parts."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from common.weights import export
from common.weights.huggingface import huggingface_name
from tests.parity.runs import reference
from tests.parity.test_narrow import NORM_TOLERANCE
from tests.resume.layouts import (
    BFLOAT16,
    EXPERTS,
    FLOAT32,
    RINGS,
    TIED,
    TRAINING,
    UNTIED,
    assert_curve,
    assert_held,
    layouts_of,
    run_jobs,
    whole,
)


class Chain(NamedTuple):
    """A run that changes its layout after every step: its folder, its layouts, what every rank has found in each."""

    folder: Path
    names: list[str]
    found: list[list[dict]]

    def saved(self, layout: str) -> tuple[Path, dict[str, np.ndarray]]:
        """The checkpoint that a layout has written, and the state that its ranks held then."""
        index = self.names.index(layout)
        return self.folder / f"checkpoints/step-{index + 1:08d}", whole(self.found[index])


@pytest.fixture(scope="module")
def chains(tmp_path_factory) -> dict[str, Chain]:
    """The run round each ring, by its flags. All starts are in one folder, whose record is that of one run."""
    made = {}
    for flags in RINGS:
        ring, folder = layouts_of(flags), tmp_path_factory.mktemp("chain")
        names = [*ring, ring[0]]
        every = f"{flags} --save-every 1 --resume auto --run-dir {folder}"
        found = run_jobs([(name, f"{every} --steps {steps}") for steps, name in enumerate(names, 1)])
        made[flags] = Chain(folder, names, found)
    return made


def test_every_layout_goes_on_in_another(chains):
    """And copies of what several ranks hold, as norms and shared K/V heads, are equal after a step, too."""
    for flags, (_, names, found) in chains.items():
        for before, after, name in zip(found, found[1:], names[1:]):
            assert_held(after, whole(before), f"{flags}: {name}")
            assert_held(after, whole(after), f"{flags}: copies in {name}", "end")
        exact = flags in (UNTIED, TIED, EXPERTS)
        expected = reference(f"{TRAINING} {flags} {'--micro-batch 12' if exact else ''} --steps {len(names)}")
        assert_curve(found[-1], expected, 1e-11 if exact else NORM_TOLERANCE / 10, flags)
        end = whole(found[-1])
        for name, value in expected.parameters.items() if exact else ():
            difference = np.linalg.norm(end[f"parameter/{name}"] - value) / np.linalg.norm(value)
            assert difference < 1e-10, (flags, name, difference)


RETYPED = [  # a float32 run goes on from just what a bfloat16 run has saved; and back
    ("2 3 --zero 3", BFLOAT16, "2 3 --zero 1 --bucket-mb 0.02", FLOAT32),
    ("3 3 --micro-batch 2 --zero 2 --zero-reduce step --bucket-mb 0.02", FLOAT32, "2 2 --bucket-mb 0.02", BFLOAT16),
]


def test_narrow_types_save_their_float32_masters(chains, tmp_path):
    starts = [chains[flags].saved(layout) for layout, flags, *_ in RETYPED]
    jobs = []
    for (folder, _), (_, _, layout, flags) in zip(starts, RETYPED, strict=True):
        steps = int(folder.name.removeprefix("step-")) + 1
        jobs.append((layout, f"{flags} --resume {folder} --steps {steps} --run-dir {tmp_path}/{steps}"))
    for ranks, (folder, saved) in zip(run_jobs(jobs), starts, strict=True):
        assert_held(ranks, saved, folder)
        head = torch.tensor(saved["parameter/head.weight"])
        assert torch.equal(head.float().double(), head) and not torch.equal(head.bfloat16().double(), head), folder
        assert len(ranks[0]["curve"]) == 1, folder


# ---- Hugging Face weights --------------------------------------------------------------------------------------------

TP_2, TP_4 = "2 4 --tp 2 --zero 1", "4 4 --tp 4 --no-sequence-parallel --tp-mode plain"
EXPORTED = [(TP_2, UNTIED), (TP_4, TIED), ("2 5 --pp 2 --schedule zbv", UNTIED)]
EXPORTED += [("4 5 --pp 2 --dp 2 --zero 1 --schedule dualpipe", TIED)]
READING = {  # how much of the model a rank may read at most
    ("2 3 --zero 3", UNTIED): 0.51,
    (TP_2, UNTIED): 0.51,
    ("2 5 --pp 2 --schedule interleaved", TIED): 0.66,  # embedding and head are on different ranks
    ("2 5 --pp 2 --schedule dualpipe", TIED): 1.3,  # both ranks hold all layers, and each reads embedding and head
    (TP_4, UNTIED): 0.29,  # two ranks share a K/V head
    (TP_4, TIED): 0.29,
}


@pytest.fixture(scope="module")
def exported(chains, tmp_path_factory) -> dict[tuple[str, str], Path]:
    """Checkpoints as `python -m common.export` writes them."""
    folders = {job: tmp_path_factory.mktemp("exported") for job in EXPORTED}
    for (layout, flags), folder in folders.items():
        assert export.main([str(chains[flags].saved(layout)[0]), str(folder)]) == 0
    return folders


def test_export_of_divided_models(exported, chains):
    """Bit for bit, and nothing of the padding."""
    for (layout, flags), folder in exported.items():
        state, written = chains[flags].saved(layout)[1], load_file(folder / "model.safetensors")
        weights = {name.removeprefix("parameter/"): state[name] for name in state if name.startswith("parameter/")}
        assert written.keys() == {huggingface_name(name) for name in weights}
        for name, values in weights.items():
            assert np.array_equal(written[huggingface_name(name)].numpy(), values), (layout, flags, name)


def test_every_rank_reads_only_its_boxes(exported, tmp_path):
    start = {UNTIED: f"--init-from {exported[EXPORTED[0]]}", TIED: f"--init-from {exported[EXPORTED[1]]}"}
    jobs = []
    for layout, flags in READING:
        jobs.append((layout, f"{flags} {start[flags]} --steps 1 --run-dir {tmp_path}/{len(jobs)}"))
    for job, ranks in zip(READING, run_jobs(jobs), strict=True):
        expected = reference(f"{TRAINING} {job[1]} --micro-batch 12 --steps 1 {start[job[1]]}")
        assert_curve(ranks, expected, 1e-13, job)
        total = sum(values.size for values in expected.parameters.values())
        for rank in ranks:
            held = {}
            for name, shape, box, _, _ in rank["end"]:
                kind, _, name = name.partition("/")
                size = math.prod(max(0, min(stop, size) - start) for size, (start, stop) in zip(shape, box))
                if kind == "parameter" and size:
                    held[huggingface_name(name)] = held.get(huggingface_name(name), 0) + size
            assert rank["read"] == held, job
            assert sum(held.values()) <= READING[job] * total, job
