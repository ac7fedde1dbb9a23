"""A checkpoint of any layout goes on in any other, bit for bit; Hugging Face weights are written and read by parts."""

import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from common.weights import export
from common.weights.huggingface import huggingface_name
from tests.parity.runs import assemble, reference, train_case
from tests.parity.test_narrow import NORM_TOLERANCE
from tests.resume import layouts
from tests.resume.layouts import LAYOUTS, TRAINING, run_jobs, whole

UNTIED, TIED = "--no-tie-embeddings", "--tie-embeddings"
EXPERTS = f"{UNTIED} --experts 8 --expert-ffn 20 --shared-experts 1 --dense-layers 1 --balance bias --bias-rate 0.003"
BFLOAT16, FLOAT32 = (f"{UNTIED} --dtype {dtype} --micro-batch 1" for dtype in ("bfloat16", "float32"))
# Within a ring, each layout takes one step and saves it for the next one, the last for the first. Narrow types have
# micro-batches of one sample, since these are rounded alike in every layout.
RINGS = {
    UNTIED: ["one process", "zbv", "zero 2", "tp 4", "dp", "1f1b, tp, zero 1", "zero 1 on 3", "dualpipe"]
    + ["tp 2, zero 1", "zero 3 on 3", "interleaved", "zero 1", "tp 2, zero 3", "zero 3", "zbv, zero 3"]
    + ["zero 3, two copies", "8 ranks, zero 1", "cp 2, zero 3"],
    TIED: ["one process", "dualpipe, zero 1", "tp 2, zero 2, chunked", "zb-h2", "tp 4", "1f1b", "tp 4, sequence"]
    + ["cp 2, zbv"],
    BFLOAT16: ["one process", "zero 2 on 3", "zero 3, two copies", "zero 3"],
    FLOAT32: ["zero 3, two copies", "zero 2 on 3"],
    EXPERTS: ["all experts", "ep 4", "8 ranks, cp inside, zero 3", "8 ranks, ep 2, zbv", "ep 2, zero 3"]
    + ["ep 2, dualpipe"],
}
LEFT_OUT = {"zero 2", "dp", "zero 1", "zero 3 on 3", "zbv, zero 3", "zb-h2", "1f1b", "tp 4, sequence"}
LEFT_OUT |= {"8 ranks, ep 2, zbv", "ep 2, zero 3"}
if os.environ.get("TEST_ALL"):
    for flags in (UNTIED, TIED, EXPERTS):
        RINGS[flags] += layouts.draw_layouts(flags, 10)
else:
    RINGS = {flags: [layout for layout in ring if layout not in LEFT_OUT] for flags, ring in RINGS.items()}
RETYPED = [  # a float32 run goes on from just what a bfloat16 run has saved; and back
    (("zero 3", BFLOAT16), ("zero 1", FLOAT32)),
    (("zero 2 on 3", FLOAT32), ("dp", BFLOAT16)),
]


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
    for flags, ring in RINGS.items():
        folder, names = tmp_path_factory.mktemp("chain"), [*ring, ring[0]]
        every = f"{flags} --save-every 1 --resume auto --run-dir {folder}"
        found = run_jobs([(name, f"{every} --steps {steps}") for steps, name in enumerate(names, 1)])
        made[flags] = Chain(folder, names, found)
    return made


def test_every_layout_goes_on_in_another(chains):
    tried = {layout for ring in RINGS.values() for layout in ring}
    assert tried == LAYOUTS.keys() - (LEFT_OUT - tried)
    for flags, (_, names, found) in chains.items():
        for before, after, name in zip(found, found[1:], names[1:]):
            layouts.assert_loaded(after, whole(before), f"{flags}: {name}")
        exact = flags in (UNTIED, TIED, EXPERTS)
        training = f"{TRAINING} {flags} {'--micro-batch 12' if exact else ''} --steps {len(names)}"
        expected = reference(training) if flags != EXPERTS else assemble([train_case(7, training)])
        layouts.assert_curve(found[-1], expected, 1e-11 if exact else NORM_TOLERANCE / 10, flags)
        if exact:
            layouts.assert_ends(found[-1], expected, 1e-10, flags)


def test_narrow_types_save_their_float32_masters(chains, tmp_path):
    starts = [chains[flags].saved(layout) for (layout, flags), _ in RETYPED]
    jobs = []
    for (folder, _), (_, (layout, flags)) in zip(starts, RETYPED, strict=True):
        steps = int(folder.name.removeprefix("step-")) + 1
        jobs.append((layout, f"{flags} --resume {folder} --steps {steps} --run-dir {tmp_path}/{steps}"))
    for ranks, (folder, saved) in zip(run_jobs(jobs), starts, strict=True):
        layouts.assert_loaded(ranks, saved, folder)
        head = torch.tensor(saved["parameter/head.weight"])
        assert torch.equal(head.float().double(), head) and not torch.equal(head.bfloat16().double(), head), folder
        assert len(ranks[0]["curve"]) == 1, folder


# ---- Hugging Face weights --------------------------------------------------------------------------------------------

EXPORTED = [("tp 2, zero 1", UNTIED), ("tp 4", TIED), ("zbv", UNTIED), ("dualpipe, zero 1", TIED)]
READING = {  # how much of the model a rank may read at most
    ("zero 3", UNTIED): 0.51,
    ("tp 2, zero 1", UNTIED): 0.51,
    ("interleaved", TIED): 0.66,  # embedding and head are on different ranks
    ("dualpipe", TIED): 1.3,  # both ranks hold all layers, and each reads embedding and head
    ("tp 4", UNTIED): 0.29,  # two ranks share a K/V head
    ("tp 4", TIED): 0.29,
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
        layouts.assert_curve(ranks, expected, 1e-13, job)
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
