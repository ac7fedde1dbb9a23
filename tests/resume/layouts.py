"""Layouts of all steps, and what becomes of a run that is saved in one of them and resumed in another."""

import itertools
import json
import os
import random
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import safetensors
import torch.distributed.checkpoint  # noqa: F401, so that the fork server imports it once for all ranks

from common.start import environment
from step01_single_gpu import initial_weights
from step01_single_gpu.mixed_precision import Optimizer
from tests.harness.ranks import run_ranks
from tests.parity.runs import SMALL, assemble, train_here
from tests.parity.test_step08 import LAYOUT, is_allowed
from tests.unit.test_huggingface import counting_safe_open, elements_read

# 4 tensor-parallel ranks share 2 K/V heads, and the vocabulary of 257 has 1 row of padding on 2 of them and 3 on 4
TRAINING = "--layers 4 --vocab 257 --optimizer adamw --lr 1e-3 --clip 0.5"
LAYOUTS = {  # name: (ranks, step, flags)
    "one process": (1, 1, "--micro-batch 4"),
    "zbv": (2, 5, "--pp 2 --schedule zbv"),
    "zero 2": (2, 3, "--zero 2"),
    "tp 4": (4, 4, "--tp 4 --no-sequence-parallel --tp-mode plain"),
    "dp": (2, 2, "--bucket-mb 0.02"),
    "1f1b, tp, zero 1": (4, 5, "--pp 2 --tp 2 --zero 1 --schedule 1f1b"),
    "zero 1 on 3": (3, 3, "--micro-batch 2 --zero 1 --bucket-mb 0.02"),
    "dualpipe": (2, 5, "--pp 2 --schedule dualpipe --recompute full"),
    "tp 2, zero 1": (2, 4, "--tp 2 --zero 1"),
    "zero 3 on 3": (3, 3, "--micro-batch 2 --zero 3 --recompute full"),
    "zb-h2": (2, 5, "--pp 2 --schedule zb-h2"),
    "zero 1": (2, 3, "--zero 1 --bucket-mb 0.02"),
    "tp 2, zero 3": (4, 4, "--tp 2 --dp 2 --zero 3 --recompute full"),
    "interleaved": (2, 5, "--pp 2 --schedule interleaved"),
    "zero 3": (2, 3, "--zero 3"),
    "dualpipe, zero 1": (4, 5, "--pp 2 --dp 2 --zero 1 --schedule dualpipe"),
    "zero 2 on 3": (3, 3, "--micro-batch 2 --zero 2 --zero-reduce step --bucket-mb 0.02"),
    "tp 4, sequence": (4, 4, "--tp 4"),
    "zbv, zero 3": (4, 5, "--pp 2 --dp 2 --zero 3 --schedule zbv"),
    "zero 3, two copies": (4, 3, "--zero 3 --zero-replicas 2"),
    "1f1b": (2, 5, "--pp 2 --schedule 1f1b"),
    "tp 2, zero 2, chunked": (4, 4, "--tp 2 --zero 2 --tp-mode chunked"),
    "cp 2, zero 3": (2, 6, "--cp 2 --zero 3"),
    "cp 2, zbv": (4, 6, "--cp 2 --pp 2 --schedule zbv --cp-mode allgather"),
    "all experts": (1, 7, ""),
    "ep 4": (4, 7, "--ep 4 --dp 2 --tp 2"),
    "ep 2, zero 3": (4, 7, "--ep 2 --dp 4 --zero 3 --recompute full"),
    "ep 2, dualpipe": (4, 7, "--ep 2 --cp 2 --pp 2 --schedule dualpipe --zero 1"),
    "8 ranks, zero 1": (8, 8, "--pp 2 --cp 2 --tp 2 --zero 1"),
    "8 ranks, cp inside, zero 3": (8, 8, "--pp 2 --cp 2 --tp 2 --ep 4 --zero 3 --order cp,pp,tp,dp"),
    "8 ranks, ep 2, zbv": (8, 8, "--dp 2 --pp 2 --tp 2 --ep 2 --schedule zbv --zero 2 --recompute full"),
}


def draw_layouts(training: str, count: int) -> list[str]:
    """Add layouts of 8 ranks, drawn from all that the steps know, to LAYOUTS if TEST_ALL=1 is set; their names."""
    chance, names = random.Random(training), []
    while os.environ.get("TEST_ALL") and len(names) < count:
        degrees = {name: chance.choice([1, 2, 2, 4]) for name in ("dp", "pp", "cp", "tp")}
        degrees |= {"ep": chance.choice([2, 4, 8])} if "--experts" in training else {}
        parts = [f"--{name} {size}" for name, size in degrees.items()]
        flags = " ".join(filter(None, parts + [chance.choice(values) for values in LAYOUT.values()]))
        if flags not in LAYOUTS and is_allowed(8, f"{TRAINING} {training} {flags}"):
            LAYOUTS[flags] = 8, 8, flags
            names.append(flags)
    return names


def state_of(optimizer: Optimizer) -> list[tuple]:
    """Master weights and moments as this rank holds them: name, whole shape, box, values, whether it owns them."""
    held = optimizer.slices()
    return [(s.name, s.global_shape, s.box, s.tensor.detach().double().numpy().copy(), s.owner) for s in held]


def train_and_look(step: int, flags: str) -> dict:
    """Train. What this rank has found: the `curve` (rank 0), the optimizer's state when it was `loaded` and at the
    `end`, and how many elements of each Hugging Face weight were `read`.
    """
    found, made, initialise, loaded = {}, [], Optimizer.__init__, Optimizer.loaded

    def keep(self, *arguments):
        made.append(self)
        initialise(self, *arguments)

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
    if environment().rank == 0:
        folder = flags.split("--run-dir ")[1].split()[0]
        lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
        found["curve"] = [(line["step"], line["loss"], line["grad_norm"]) for line in lines]
    return found | {"end": state_of(made[-1]), "read": dict(elements_read)}


def look_at_all(jobs: list[tuple[int, str]]) -> list[dict]:
    return [train_and_look(step, flags) for step, flags in jobs]


def run_jobs(jobs: list[tuple[str, str]]) -> list[list[dict]]:
    """What every rank has found in each job, (layout, other flags), one after the other. Neighbours with as many ranks
    share a start of their world.
    """
    found = []
    for world, neighbours in itertools.groupby(jobs, lambda job: LAYOUTS[job[0]][0]):
        calls = []
        for name, flags in neighbours:
            _, step, layout = LAYOUTS[name]
            calls.append((step, f"{SMALL} --peak-tflops 1 --micro-batch 3 {TRAINING} {layout} {flags}"))
        found += map(list, zip(*run_ranks(world, look_at_all, calls, timeout=300), strict=True))
    return found


def whole(ranks: list[dict], moment: str = "end") -> dict[str, np.ndarray]:
    """The state of all ranks put together; every element must be owned once."""
    parts = [{"curve": [(0, 0)], "boxes": [each[:4] for each in rank[moment] if each[4]]} for rank in ranks]
    return assemble(parts).parameters


def assert_loaded(ranks: list[dict], saved: dict[str, np.ndarray], case: object) -> None:
    """Every rank, owner or not, has the saved values, bit for bit, and together they have all of them."""
    for rank in ranks:
        for name, shape, box, values, _ in rank["loaded"]:
            inside = tuple(slice(max(0, size - start)) for size, (start, _) in zip(shape, box))
            assert np.array_equal(values[inside], saved[name][tuple(slice(*axis) for axis in box)]), (case, name, box)
    assert whole(ranks, "loaded").keys() == saved.keys(), case


def assert_curve(ranks: list[dict], expected, tolerance: float, case: object) -> None:
    """The record is that of the undisturbed run."""
    steps, losses, norms = zip(*ranks[0]["curve"])
    assert steps == tuple(range(len(expected.losses))), case
    np.testing.assert_allclose(losses, expected.losses, rtol=tolerance, err_msg=f"loss, {case}")
    np.testing.assert_allclose(norms, expected.norms, rtol=10 * tolerance, err_msg=f"gradient norm, {case}")


def assert_ends(ranks: list[dict], expected, tolerance: float, case: object) -> None:
    """The weights at the end are those of the undisturbed run."""
    end = whole(ranks)
    for name, value in expected.parameters.items():
        difference = np.linalg.norm(end[f"parameter/{name}"] - value) / np.linalg.norm(value)
        assert difference < tolerance, (case, name, difference)
