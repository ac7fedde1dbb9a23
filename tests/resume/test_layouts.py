"""A checkpoint of any layout goes on in any other, bit for bit; Hugging Face weights are written and read by parts."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from common.weights import export
from common.weights.huggingface import huggingface_name
from tests.harness.ranks import run_ranks
from tests.parity.runs import SMALL, assemble, curve_of, reference, train_case
from tests.parity.test_step03_precision import NORM_TOLERANCE
from tests.resume import layouts
from tests.resume.layouts import LAYOUTS, TRAINING, Job, run_jobs, whole

SAVED, END = 1, 2  # steps before the checkpoint, and in all
UNTIED, TIED = "--no-tie-embeddings", "--tie-embeddings"
EXPERTS = f"{UNTIED} --experts 8 --expert-ffn 20 --shared-experts 1 --dense-layers 1 --balance bias --bias-rate 0.003"
BFLOAT16, FLOAT32 = (f"{UNTIED} --dtype {dtype} --micro-batch 1" for dtype in ("bfloat16", "float32"))
# Within a ring, each layout resumes from the next one. Narrow types have micro-batches of one sample, since these are
# rounded alike in every layout.
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
CASES = [
    (Job(source, flags), Job(target, flags))
    for flags, ring in RINGS.items()
    for source, target in zip(ring[1:] + ring[:1], ring)
]
RETYPED = [  # a float32 run goes on from just what a bfloat16 run has saved; and back
    (Job("zero 3", BFLOAT16), Job("zero 1", FLOAT32)),
    (Job("zero 2 on 3", FLOAT32), Job("dp", BFLOAT16)),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[Job, tuple[Path, dict[str, np.ndarray]]]:
    """The run folder and the state of every job that saves. All jobs of a world share one start of its ranks."""
    folders = {source: tmp_path_factory.mktemp("saved") for source in dict.fromkeys(case[0] for case in CASES)}
    steps = f"--steps {SAVED} --save-every {SAVED} --run-dir"
    found = run_jobs({job: f"{steps} {folder}" for job, folder in folders.items()})
    return {job: (folders[job], whole(ranks)) for job, ranks in found.items()}


@pytest.fixture(scope="module")
def resumed(saved, tmp_path_factory) -> dict[tuple[Job, Job], list[dict]]:
    """What every rank has found in each case, after a check of what it has loaded."""
    jobs = {}
    for source, target in CASES + RETYPED:
        resume = f"--steps {END} --resume {saved[source][0]} --run-dir {tmp_path_factory.mktemp('resumed')}"
        jobs[source, target] = Job(target.layout, f"{target.flags} {resume}")
    found = run_jobs(dict.fromkeys(jobs.values(), ""))
    for (source, target), job in jobs.items():
        layouts.assert_loaded(found[job], saved[source][1], f"{source} into {target}")
    return {case: found[job] for case, job in jobs.items()}


def test_every_layout_goes_on_in_another(resumed):
    tried = {layout for ring in RINGS.values() for layout in ring}
    assert tried == LAYOUTS.keys() - (LEFT_OUT - tried)
    for source, target in CASES:
        ranks, exact = resumed[source, target], target.flags in (UNTIED, TIED, EXPERTS)
        flags = f"{TRAINING} {target.flags} {'--micro-batch 12' if exact else ''} --steps {END}"
        expected = reference(flags) if target.flags != EXPERTS else assemble([train_case(7, flags)])
        tolerance = 1e-13 if exact else NORM_TOLERANCE / 10
        layouts.assert_goes_on(ranks, expected, SAVED, tolerance, f"{source} into {target}")
        if exact:
            layouts.assert_ends(ranks, expected, 1e-12, f"{source} into {target}")


def test_narrow_types_save_their_float32_masters(resumed, saved):
    for source, target in RETYPED:  # that these were loaded, bit for bit, has been checked
        head = torch.tensor(saved[source][1]["parameter/head.weight"])
        assert torch.equal(head.float().double(), head) and not torch.equal(head.bfloat16().double(), head), source
        assert [step for step, *_ in resumed[source, target][0]["curve"]] == list(range(SAVED, END))


def test_resume_auto_in_one_folder(tmp_path):
    """Another layout at every start; the record is that of one run."""
    flags = (
        f"{SMALL} {TRAINING} {UNTIED} --peak-tflops 1 --micro-batch 3 --save-every 1 --resume auto --run-dir {tmp_path}"
    )
    starts = zip(("1f1b", "zero 3", "interleaved"), (1, 2, 3))
    calls = [(LAYOUTS[name][1], f"{flags} {LAYOUTS[name][2]} --steps {steps}") for name, steps in starts]
    run_ranks(2, layouts.look_at_all, calls)
    expected = reference(f"{TRAINING} {UNTIED} --micro-batch 12 --steps 3")
    np.testing.assert_allclose(curve_of(tmp_path), list(zip(expected.losses, expected.norms)), rtol=1e-12)


# ---- Hugging Face weights --------------------------------------------------------------------------------------------

EXPORTED = [Job("tp 2, zero 1", UNTIED), Job("tp 4", TIED), Job("zbv", UNTIED), Job("dualpipe, zero 1", TIED)]
READING = {  # how much of the model a rank may read at most
    Job("zero 3", UNTIED): 0.51,
    Job("tp 2, zero 1", UNTIED): 0.51,
    Job("tp 4", UNTIED): 0.29,  # two ranks share a K/V head
    Job("tp 4", TIED): 0.29,
    Job("interleaved", TIED): 0.66,  # embedding and head are on different ranks
    Job("dualpipe", TIED): 1.3,  # both ranks hold all layers, and each reads embedding and head
}


@pytest.fixture(scope="module")
def exported(saved, tmp_path_factory) -> dict[Job, Path]:
    """Checkpoints as `python -m common.export` writes them."""
    folders = {job: tmp_path_factory.mktemp("exported") for job in EXPORTED}
    for job, folder in folders.items():
        assert export.main([str(saved[job][0]), str(folder)]) == 0
    return folders


def test_export_of_divided_models(exported, saved):
    """Bit for bit, and nothing of the padding."""
    for job, folder in exported.items():
        state, written = saved[job][1], load_file(folder / "model.safetensors")
        weights = {name.removeprefix("parameter/"): state[name] for name in state if name.startswith("parameter/")}
        assert written.keys() == {huggingface_name(name) for name in weights}
        for name, values in weights.items():
            assert np.array_equal(written[huggingface_name(name)].numpy(), values), (job, name)


def test_every_rank_reads_only_its_boxes(exported, tmp_path):
    start = {UNTIED: f"--init-from {exported[EXPORTED[0]]}", TIED: f"--init-from {exported[EXPORTED[1]]}"}
    rest = {job: f"{start[job.flags]} --steps 2 --run-dir {tmp_path}/{index}" for index, job in enumerate(READING)}
    for job, ranks in run_jobs(rest).items():
        expected = reference(f"{TRAINING} {job.flags} --micro-batch 12 --steps 2 {start[job.flags]}")
        layouts.assert_goes_on(ranks, expected, 0, 1e-13, job)
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
