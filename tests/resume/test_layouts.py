"""A checkpoint of any layout goes on in any other, bit for bit; Hugging Face weights are written and read by parts."""

import itertools
import math
import random
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import safetensors
import torch
import torch.distributed.checkpoint  # noqa: F401, so that the fork server imports it once for all ranks
from safetensors.torch import load_file

from common import export
from common.start import environment
from common.weights.huggingface import huggingface_name
from step01_single_gpu import initial_weights
from step01_single_gpu.mixed_precision import Optimizer
from tests.harness.counted_reads import counting_safe_open, elements_read
from tests.harness.ranks import run_ranks, run_script
from tests.parity.cases import ALL
from tests.parity.drawn import LAYOUT, is_allowed
from tests.parity.runs import SMALL, assemble, curve_of, reference, train_here
from tests.parity.test_narrow import NORM_TOLERANCE

# 4 tensor-parallel ranks share 2 K/V heads, and the vocabulary of 257 has 1 row of padding on 2 of them and 3 on 4
TRAINING = "--layers 4 --vocab 257 --optimizer adamw --lr 1e-3 --clip 0.5"
UNTIED, TIED = "--no-tie-embeddings", "--tie-embeddings"
EXPERTS = f"{UNTIED} --experts 8 --expert-ffn 20 --shared-experts 1 --dense-layers 1 --balance bias --bias-rate 0.003"
BFLOAT16, FLOAT32 = (f"{UNTIED} --dtype {dtype} --micro-batch 1" for dtype in ("bfloat16", "float32"))
# Within a ring, each layout (ranks, step, flags) takes one step and saves it for the next one, the last for the first.
# Narrow types have micro-batches of one sample, since these are rounded alike in every layout
RINGS = {
    UNTIED: """
        1 1 --micro-batch 4
        2 5 --pp 2 --schedule zbv
        4 4 --tp 4 --no-sequence-parallel --tp-mode plain
        4 5 --pp 2 --tp 2 --zero 1 --schedule 1f1b
        3 3 --micro-batch 2 --zero 1 --bucket-mb 0.02
        2 5 --pp 2 --schedule dualpipe --recompute full
        2 4 --tp 2 --zero 1
        2 5 --pp 2 --schedule interleaved
        4 4 --tp 2 --dp 2 --zero 3 --recompute full
        2 3 --zero 3
        4 3 --zero 3 --zero-replicas 2
        8 8 --pp 2 --cp 2 --tp 2 --zero 1
        2 6 --cp 2 --zero 3
    """,
    TIED: """
        1 1 --micro-batch 4
        4 5 --pp 2 --dp 2 --zero 1 --schedule dualpipe
        4 4 --tp 2 --zero 2 --tp-mode chunked
        4 4 --tp 4 --no-sequence-parallel --tp-mode plain
        4 6 --cp 2 --pp 2 --schedule zbv --cp-mode allgather
    """,
    BFLOAT16: """
        1 1 --micro-batch 4
        3 3 --micro-batch 2 --zero 2 --zero-reduce step --bucket-mb 0.02
        4 3 --zero 3 --zero-replicas 2
        2 3 --zero 3
    """,
    FLOAT32: """
        4 3 --zero 3 --zero-replicas 2
        3 3 --micro-batch 2 --zero 2 --zero-reduce step --bucket-mb 0.02
    """,
    EXPERTS: """
        1 7
        4 7 --ep 4 --dp 2 --tp 2
        8 8 --pp 2 --cp 2 --tp 2 --ep 4 --zero 3 --order cp,pp,tp,dp
        4 7 --ep 2 --cp 2 --pp 2 --schedule dualpipe --zero 1
    """,
}
SECOND = f"{EXPERTS} --mtp 1"  # the embedding at both ends, though it is not tied
if ALL:
    RINGS[SECOND] = """
        1 8
        4 8 --ep 2 --dp 2 --pp 2 --schedule dualpipe --zero 1
        4 8 --ep 4 --cp 2 --tp 2 --zero 3
        2 8 --ep 1 --pp 2 --schedule zbv --recompute full
    """


def layouts_of(training: str) -> list[str]:
    """The ring of these flags; with TEST_ALL=1 also ten layouts of 8 ranks drawn from all that the steps know."""
    ring = [line.strip() for line in RINGS[training].strip().splitlines()]
    chance, size = random.Random(training), len(ring) + 10 * (training in (UNTIED, TIED, EXPERTS))
    while ALL and len(ring) < size:
        degrees = {name: chance.choice([1, 2, 2, 4]) for name in ("dp", "pp", "cp", "tp")}
        degrees |= {"ep": chance.choice([2, 4, 8])} if "--experts" in training else {}
        parts = [f"--{name} {size}" for name, size in degrees.items()]
        flags = " ".join(filter(None, parts + [chance.choice(values) for values in LAYOUT.values()]))
        if f"8 8 {flags}" not in ring and is_allowed(8, f"{TRAINING} {training} {flags}"):
            ring.append(f"8 8 {flags}")
    return ring


def state_of(optimizer: Optimizer) -> list[tuple]:
    """Master weights and moments as this rank holds them: name, whole shape, box, values, whether it owns them."""
    held = optimizer.slices()
    return [(s.name, s.global_shape, s.box, s.tensor.detach().double().numpy().copy(), s.owner) for s in held]


def train_and_look(step: int, flags: str) -> dict:
    """Train. What this rank has found: the `curve` (rank 0), the optimizer's state when it was `loaded` and at the
    `end`, and how many elements of each Hugging Face weight were `read`.
    """
    found, made, initialise, loaded = {}, [], Optimizer.__init__, Optimizer.loaded

    def keep(self, *arguments, **options):
        made.append(self)
        initialise(self, *arguments, **options)

    def look(self, updates):
        loaded(self, updates)
        found["loaded"] = state_of(self)

    elements_read.clear()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Optimizer, "__init__", keep))
        stack.enter_context(mock.patch.object(Optimizer, "loaded", look))
        stack.enter_context(mock.patch.object(safetensors, "safe_open", counting_safe_open))
        # transformers would be loaded in every rank; the test's own process has let it check the same folder
        stack.enter_context(mock.patch.object(initial_weights, "check_config"))
        train_here(step, flags)
    curve = curve_of(flags.split("--run-dir ")[1].split()[0]) if environment().rank == 0 else []
    return found | {"curve": curve, "end": state_of(made[-1]), "read": dict(elements_read)}


def look_at_all(jobs: list[tuple[int, str]]) -> list[dict]:
    return [train_and_look(step, flags) for step, flags in jobs]


def run_jobs(jobs: list[tuple[str, str]]) -> list[list[dict]]:
    """What every rank has found in each job, (layout, other flags), one after the other. Neighbours with as many ranks
    share a start of their world.
    """
    found = []
    for world, neighbours in itertools.groupby(jobs, lambda job: int(job[0].split()[0])):
        calls = []
        for layout, flags in neighbours:
            step, layout = layout.split()[1], " ".join(layout.split()[2:])
            calls.append((int(step), f"{SMALL} --peak-tflops 1 --micro-batch 3 {TRAINING} {layout} {flags}"))
        found += map(list, zip(*run_ranks(world, look_at_all, calls, timeout=300), strict=True))
    return found


def whole(ranks: list[dict], moment: str = "end") -> dict[str, np.ndarray]:
    """The state of all ranks put together; every element must be owned once."""
    parts = [{"curve": [(0, 0)], "boxes": [each[:4] for each in rank[moment] if each[4]]} for rank in ranks]
    return assemble(parts).parameters


def assert_held(ranks: list[dict], saved: dict[str, np.ndarray], case: object, moment: str = "loaded") -> None:
    """Every rank, owner or not, has these values, bit for bit, and together they have all of them."""
    for rank in ranks:
        for name, shape, box, values, _ in rank[moment]:
            inside = tuple(slice(max(0, size - start)) for size, (start, _) in zip(shape, box))
            assert np.array_equal(values[inside], saved[name][tuple(slice(*axis) for axis in box)]), (case, name, box)
    assert whole(ranks, moment).keys() == saved.keys(), case


def assert_curve(ranks: list[dict], expected, tolerance: float, case: object) -> None:
    """The record is that of the undisturbed run."""
    losses, norms = zip(*ranks[0]["curve"])
    np.testing.assert_allclose(losses, expected.losses, rtol=tolerance, err_msg=f"loss, {case}")
    np.testing.assert_allclose(norms, expected.norms, rtol=10 * tolerance, err_msg=f"gradient norm, {case}")


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
        exact = flags in (UNTIED, TIED, EXPERTS, SECOND)
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


def test_pytorch_converts_divided_checkpoints(chains, tmp_path):
    """Its own command makes one file of them: all tensors, bit for bit, and nothing of the padding."""
    for layout, flags in (*EXPORTED, (layouts_of(EXPERTS)[-1], EXPERTS)):
        folder, state = chains[flags].saved(layout)
        command = "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", folder, tmp_path / "whole.pt"
        done = run_script(*command, module=__name__)
        assert done.returncode == 0, done.stderr
        tensors = torch.load(tmp_path / "whole.pt", weights_only=True)
        assert tensors.keys() == state.keys(), (layout, flags)
        for name, tensor in tensors.items():
            assert np.array_equal(tensor.double().numpy(), state[name]), (layout, flags, name)


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
