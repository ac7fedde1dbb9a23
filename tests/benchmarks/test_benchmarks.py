"""What the benchmarks say: memory on small models, where it is counted; the tables; and which results are stale."""

import gc
from collections.abc import Callable
from functools import partial

import pytest

from tests.benchmarks import context_parallel, data_parallel, expert_parallel, kept, pipeline, tensor_parallel, zero
from tests.benchmarks.kept import NAMES, changed_files, code_of, files_run, hash_of, load
from tests.benchmarks.paired import our_step, peak_of_steps
from tests.benchmarks.tables import PAGES, TABLES, with_tables
from tests.harness.ranks import ROOT, run_ranks

# Small, but with gradients of five buckets, and states that outweigh what is fixed
SHAPE = "--hidden 128 --layers 6 --heads 4 --kv-heads 4 --ffn 352 --vocab 256 --no-tie-embeddings --seq-len 16"
BATCH, TENSOR = "--micro-batch 1 --global-batch 2 --bucket-mb 1", "--micro-batch 2 --global-batch 2 --tp 2"
PIPELINE = f"--micro-batch 1 --global-batch {pipeline.MICRO_BATCHES} --pp 2"
Sides = tuple[Callable, Callable]  # ours and the peer's: makers of steps, as the benchmarks have them


def sides() -> dict[str, Sides]:
    """What the benchmarks compare, on two ranks."""
    found = {"DDP": (partial(our_step, 2, f"{SHAPE} {BATCH}"), partial(data_parallel.ddp_step, f"{SHAPE} {BATCH}"))}
    for stage in (1, 2, 3):
        ours = partial(our_step, 3, f"{SHAPE} {BATCH} --zero {stage}")
        found[f"stage {stage}"] = ours, partial(zero.peer_step, f"{SHAPE} {BATCH}", stage)
    dtensor = partial(tensor_parallel.dtensor_step, f"{SHAPE} {TENSOR}")
    for mode in ("plain", "overlap", "chunked"):
        found[f"--tp-mode {mode}"] = partial(our_step, 4, f"{SHAPE} {TENSOR} --tp-mode {mode}"), dtensor
    for name in pipeline.PEERS:
        flags = f"{SHAPE} {PIPELINE} --schedule {name}"
        found[name] = partial(our_step, 5, flags), partial(pipeline.peer_step, flags)
    for mode in context_parallel.PEERS:
        flags = context_parallel.flags_of(512, 2, f"--cp-mode {mode}")
        found[mode] = partial(context_parallel.our_attention, flags), partial(context_parallel.peer_attention, flags)
    return found


def peak_of(make: Callable) -> int:
    gc.collect()
    gc.freeze()  # what an earlier case has left is not counted
    return peak_of_steps(make(), steps=3)


def peaks() -> dict[str, tuple[int, int]]:
    """On a rank: ours and the peer's of each case, one after the other."""
    cases = sides()
    found = {make: peak_of(make) for make in dict.fromkeys(make for both in cases.values() for make in both)}
    return {name: (found[ours], found[peer]) for name, (ours, peer) in cases.items()}


def test_no_technique_needs_more_memory_than_pytorchs():
    ranks = run_ranks(2, peaks, timeout=300)
    for name in sides():
        ours, peers = (max(each[name][side] for each in ranks) for side in (0, 1))
        print(f"{name:<20} {ours / peers:.3f}  {ours / 1e6:.2f} / {peers / 1e6:.2f} MB")
        assert ours <= peers, f"{name}: {ours} bytes against {peers}"


def test_experts_need_no_more_memory_than_the_fastest_of_transformers():
    """With 2,048 tokens, as in the benchmark, the tokens outweigh four experts; with 64, the experts do."""
    for tokens in (2048, 64):
        ours = peak_of(partial(expert_parallel.our_layer, 4, tokens))
        peers = peak_of(partial(expert_parallel.peer_layer, "grouped_mm", 4, tokens))
        print(f"{tokens} {ours / peers:.4f}  {ours / 1e6:.3f} / {peers / 1e6:.3f} MB")
        lists = 2 * 8 * 2 * tokens  # two of ours hold a number of 8 bytes for each of a token's two rows
        assert ours <= peers + lists, f"{tokens} tokens: {ours} bytes against {peers}"


@pytest.mark.parametrize("page", PAGES)
def test_tables_show_the_results(page):
    text = (ROOT / page).read_text("utf-8")
    assert with_tables(page, text) == text, "write them again: python -m tests.benchmarks --write"


def test_every_result_has_its_table():
    assert {name for table in TABLES for name in table.benchmarks} == set(NAMES)
    assert round(load("data_parallel")["tracer_off_seconds_a_step"] * 1e6) == 7  # as step 2's measurements say


SOURCE = '''"""What it is for."""
import math  # for pi


class Circle:
    """A round thing.

    # not a comment
    """

    layers: int = flag(1, 2, "model", "how many")
    radius: float = 2.0

    def area(self, r):
        return math.pi * r**2  # "of r"
'''


def test_code_is_what_is_left_without_words():
    code = "class Circle:\n    radius: float = 2.0\n    def area(self, r):\n        return math.pi * r**2"
    assert code_of(SOURCE) == code
    assert code_of(SOURCE.replace("**2", "**3")) != code
    assert code_of(SOURCE.replace("2.0", "3.0")) != code
    assert code_of(SOURCE.replace("round", "very round").replace("# for", "# because of")) == code


def test_a_result_is_stale_when_code_that_ran_has_changed(monkeypatch):
    path = "common/collectives.py"
    results = {"files": {path: hash_of(path), "common/none.py": "0" * 12}, "defaults": kept.DEFAULTS}
    assert changed_files(results) == ["common/none.py"]
    monkeypatch.setattr(kept, "code_of", lambda source: source + "pass")
    assert changed_files(results) == [path, "common/none.py"]


def test_a_result_is_stale_when_a_flag_has_another_default_but_not_when_one_is_new():
    assert kept.DEFAULTS["seq_len"] == 256
    then = {name: default for name, default in kept.DEFAULTS.items() if name != "log"}
    assert changed_files({"files": {}, "defaults": then}) == []
    assert changed_files({"files": {}, "defaults": then | {"seq_len": 512, "old": 1}}) == ["seq_len", "old"]


def test_the_files_are_those_that_a_step_runs():
    step = our_step(1, f"{SHAPE} --micro-batch 1 --global-batch 1")
    files = files_run(step)
    assert {"step01_single_gpu/train.py", "step01_single_gpu/mixed_precision.py", "common/model.py"} <= set(files)
    assert not [path for path in files if path.startswith(("step02", "common/launching", "tests"))]
