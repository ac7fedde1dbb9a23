"""Every step trains exactly what one process trains: float64, each step's loss and gradient norm, each parameter."""

import itertools
import json
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from common.model import naive_attention
from step06_context_parallel import context_parallel
from step07_expert_parallel.router import Router
from tests.harness.ranks import run_ranks, steps_of
from tests.parity import runs
from tests.parity.cases import AUX, BIAS, CAPACITY, DOCUMENTS, FOUR, LIMIT, ONE, SHARED, cases_of, hard_cases
from tests.parity.drawn import COUNTS, EVERY, EXPERTS, LAYOUT, TRAINING, draw
from tests.parity.runs import ADAMW, SGD, SMALL, UNTIED, assemble, assert_parity, reference, train_case, training_of

# Step, ranks; and of step 8 at least so many dimensions, in worlds of eight layouts, since each has a time limit
WORLDS = [(step, ranks, None, None) for step in range(2, 8) for ranks in hard_cases(step)]
WORLDS += [(8, *key, first) for key, count in COUNTS.items() for first in range(0, count, 8)]


@pytest.mark.parametrize("step, ranks, least, first", WORLDS)
def test_equals_one_process(step, ranks, least, first):
    cases = draw(ranks, least, COUNTS[ranks, least])[first : first + 8] if least else cases_of(step)[ranks]
    results = runs.run_cases(ranks, step, cases) if ranks else [assemble([train_case(step, case)]) for case in cases]
    for case, result in zip(cases, results, strict=True):
        assert_parity(result, reference(training_of(case)), f"{ranks} ranks, {case}")


def within_documents(q, k, v, documents, config, cp):
    """Attention to one document after the other, each on its own."""
    outs = []
    for sample, starts in enumerate(documents):
        borders = [*zip(starts, (*starts[1:], q.shape[2]))]
        parts = [[each[sample : sample + 1, :, start:stop] for each in (q, k, v)] for start, stop in borders]
        outs.append(torch.cat([naive_attention(*part) for part in parts], dim=2))
    return torch.cat(outs)


def test_a_mask_is_attention_within_each_document():
    case = training_of(f"{UNTIED} {ADAMW} {DOCUMENTS}")
    with mock.patch.object(context_parallel, "attention", within_documents):
        expected = assemble([train_case(6, case)])
    assert_parity(reference(case), expected, case)
    assert runs.differences(expected, reference(case.replace("--mask-documents", "")))["loss"] > 1e-6  # it matters


# ---- a router that has collapsed -------------------------------------------------------------------------------------

MOE = "--expert-ffn 20 --experts 8"
COLLAPSED = [
    f"{ADAMW} {MOE} --top-k 1 {AUX} --dp 4 --ep 4 {FOUR} --zero 2",
    f"{SGD} {MOE} --top-k 1 {SHARED} --dp 2 --pp 2 --ep 2 --schedule zb-h1 {FOUR} {BIAS}",
    f"{ADAMW} {MOE} --top-k 2 --tp 2 --cp 2 --ep 4 {ONE} {CAPACITY} --recompute full",
]


def choose_the_last(self, scores: torch.Tensor) -> torch.Tensor:
    """In place of `Router.choose`: the last expert is the best one for every token, then that before it, and so on."""
    return (self.routing.experts - 1 - torch.arange(self.routing.top_k)).expand(*scores.shape[:-1], -1)


def train_collapsed(cases: list[str]) -> list[dict]:
    with mock.patch.object(Router, "choose", choose_the_last):
        return [train_case(7, flags) for flags in cases]


def test_all_tokens_go_to_one_expert():
    for case, result in zip(COLLAPSED, runs.results_of(4, train_collapsed, COLLAPSED), strict=True):
        assert_parity(result, assemble(train_collapsed([training_of(case)])), case)


def test_what_routers_count_is_that_of_all_ranks(tmp_path):
    flags = f"{SMALL} {ADAMW} {MOE} --top-k 3 --gate sigmoid {SHARED} --dense-layers 1 {LIMIT} {BIAS} --z-coef 0.01"
    two, one = (f"{flags} --capacity-factor 1 --steps 6 --run-dir {tmp_path}/{name}" for name in ("two", "one"))
    run_ranks(2, runs.train_here, 7, f"{two} --zero 1 --micro-batch 2 --ep 2")
    runs.train_here(7, f"{one} --micro-batch 12")
    for ours, theirs in zip(steps_of(tmp_path / "two"), steps_of(tmp_path / "one"), strict=True):
        assert ours["aux_loss"] == pytest.approx(theirs["aux_loss"], rel=1e-10) and ours["aux_loss"] > 0
        assert (ours["imbalance"], ours["dropped"]) == (theirs["imbalance"], theirs["dropped"])
        assert ours["imbalance"] > 1 and ours["dropped"] > 0


FROZEN = Path(__file__).with_name("golden.json")


def test_step_1_is_frozen():
    """A generated token stream, so nothing but the training can change its curve. `python -m tests.parity.test_parity`
    writes the file anew: only for a change of the training that is meant."""
    for case, expected in json.loads(FROZEN.read_text()).items():
        found = reference(f"{case} --steps 10")
        np.testing.assert_allclose(found.losses, expected["loss"], rtol=1e-11)
        np.testing.assert_allclose(found.norms, expected["grad_norm"], rtol=1e-10)


ABOUT = {"--schedule": "pp", "--cp-": "cp", "--tp-mode": "tp", "--no-seq": "tp", "--gate": "ep", "--balance": "ep"}


def test_what_the_layouts_cover():
    """Every flag is there, in runs that divide what it is about, and so are all five dimensions (this runs none)."""
    drawn = [f"{flags} " for key, count in EVERY.items() for flags in draw(*key, count)]
    for flags in filter(None, itertools.chain(*TRAINING.values(), *EXPERTS.values(), *LAYOUT.values())):
        alone = [f"--{name} 1 " for prefix, name in ABOUT.items() if flags.startswith(prefix)]
        assert any(f"{flags} " in case and not any(each in case for each in alone) for case in drawn), flags
    split = {tuple(case.partition(f"--{name}")[2].split()[0] for name in ("cp-mode", "cp-split")) for case in drawn}
    assert len(split) == 9 and any("--ep 1 " not in each and "dualpipe " in each for each in drawn if "--ep" in each)
    all_five = [case for case in drawn if "--ep" in case and not re.search(r"--(dp|pp|cp|tp|ep) 1 ", case)]
    assert len(all_five) >= EVERY[16, 5] and len({case.partition("--schedule")[2].split()[0] for case in all_five}) >= 4


if __name__ == "__main__":
    curves = {case: reference(f"{case} --steps 10") for case in json.loads(FROZEN.read_text())}
    curves = {case: {"loss": found.losses, "grad_norm": found.norms} for case, found in curves.items()}
    FROZEN.write_text(json.dumps(curves, indent=1) + "\n")
