"""The kernels compile for GPUs that are not here, and the compiler finds nothing that would make them slow there."""

import json
import os
import subprocess
import sys

import pytest

from step08_5d.gpu_ladder import compiled as ladder
from step08_5d.kernels import flash_attention, tune
from step08_5d.kernels.compiled import CASES
from step08_5d.kernels.compiling import CARDS, KIB, Compiled
from tests.mechanisms.step08.kernels.compare import needs_triton, on_cpu

ALL = bool(os.environ.get("TEST_ALL"))
OTHERS = "float16", "float32", "float64"  # types
# Bytes of a thread: no tiles have been chosen for Blackwell yet; and Triton 3.9, not 3.6, computes the addresses of all
# operands of dk and dv ahead of the loop: they do not fit, and are read back in it
MAY_SPILL, WIDE_MAY_SPILL = {100: 256, 120: 256}, {90: 256}
# Programs that must live on a multiprocessor at once, by capability. Without an entry: 1
RESIDENT = {
    ("forward", "d 64"): {90: 2},
    ("query_gradient", "d 64"): {80: 2, 89: 2, 90: 2},
    ("query_gradient", "d 128"): {80: 2, 89: 1, 90: 2},
    ("backward", "h 2048"): {80: 2, 89: 2, 90: 2},
    ("backward", "h 4096"): {80: 2, 89: 2, 90: 2},
    ("multiply", ""): {90: 2},
    ("multiply_transposed", ""): {90: 2},
}


def compiled(card: int, *groups: str, dtype: str = "bfloat16", room: str = "kernels") -> list[Compiled]:
    """In a process of its own, as here Triton interprets."""
    command = [sys.executable, "-m", f"step08_5d.{room}.compiled", "--json", "--card", str(card), "--dtype", dtype]
    done = subprocess.run([*command, "--only", *groups], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    return [Compiled(*row) for row in json.loads(done.stdout)]


def faults(row: Compiled) -> list[str]:
    """What is wrong with a kernel, in words."""
    card, fewest = CARDS[row.card], 1
    for (kernel, case), by_card in RESIDENT.items():
        if row.kernel == kernel and case in ("", row.case.split(",")[0]):
            fewest = by_card.get(row.card, 1)
    found = [f"products are serialised: {each}" for each in row.warnings]
    wide = row.kernel == "key_gradient" and row.case.startswith(("d 192", "d 256"))
    allowed = MAY_SPILL | (WIDE_MAY_SPILL if wide else {})
    found += [f"{row.spilled} bytes spill"] if row.spilled > allowed.get(row.card, 0) else []
    found += [f"{row.shared} bytes of shared memory"] if row.shared > card.shared - KIB else []
    return found + ([f"{row.resident} at once instead of {fewest}"] if row.resident < fewest else [])


def assert_approved(rows: list[Compiled]) -> None:
    wrong = {f"{row.kernel}, {row.case}, sm_{row.card}": faults(row) for row in rows if faults(row)}
    assert not wrong, wrong


@needs_triton
def test_attention_on_hopper():
    rows = compiled(90, "attention")
    assert_approved(rows)
    products = {row.kernel: row.products for row in rows if row.case.startswith("d ") and row.kernel != "merge"}
    assert products == dict.fromkeys(("forward", "query_gradient", "key_gradient"), "wgmma")
    # 32 tiles of keys, for 8 K/V heads of width 64; of width 128 there are 4, and two programs divide their query heads
    grids = {row.case: row.grid for row in rows if row.kernel == "key_gradient"}
    assert grids["d 64, causal"] == grids["d 128, causal"] == 32 * 8


@needs_triton
@pytest.mark.skipif(not ALL, reason="compiles for seconds: with TEST_ALL=1")
def test_norms_on_hopper():
    rows = compiled(90, "norms")
    assert_approved(rows)
    grids = {row.case: row.grid for row in rows if row.kernel == "backward"}  # each program adds a row of partial sums
    expected = {"h 2048": 2 * 132, "h 4096": 2 * 132, "h 8192": 132, "h 2048, 512 rows": 512 // 4}
    assert {case: grids[case] for case in expected} == expected


@needs_triton
@pytest.mark.skipif(not ALL, reason="compiles for minutes: with TEST_ALL=1")
@pytest.mark.parametrize("card, dtype", [*((card, "bfloat16") for card in CARDS), *((90, each) for each in OTHERS)])
def test_all_kernels(card, dtype):
    rows = compiled(card, *CASES, dtype=dtype)
    if dtype != "float64":
        rows += compiled(card, *ladder.CASES, dtype=dtype, room="gpu_ladder")
    if dtype == "bfloat16":
        assert_approved(rows)
    assert all(row.shared <= CARDS[card].shared - KIB for row in rows)


SOUND = Compiled("forward", "d 64, causal", 90, 123, 0, 65536, 8, 1024, 0, [], "wgmma")


@pytest.mark.parametrize(
    "card, registers, shared, warps, resident",
    [
        (90, 32, 0, 8, 8),  # warps: 64
        (90, 33, 0, 8, 6),  # registers, in units of 8 for a thread: 65,536 / (40 * 256)
        (90, 24, 0, 1, 32),  # programs: 32
        (90, 64, 113 * KIB, 8, 2),  # shared memory: 2 * (113 + 1) KiB are 228
        (89, 64, 50 * KIB, 4, 1),  # 2 * 51 KiB exceed 100
        (80, 128, 0, 32, 0),
    ],
)
def test_resident_programs(card, registers, shared, warps, resident):
    """As NVIDIA's occupancy calculator counts them."""
    row = SOUND._replace(
        card=card, registers=registers, shared=shared, warps=warps, grid=10 * CARDS[card].multiprocessors
    )
    assert row.resident == resident
    assert not resident or row.waves == 10 / resident


@needs_triton
@on_cpu  # a compiled kernel would be timed
@pytest.mark.parametrize("kernel", [0, 2])
def test_each_tile_is_tried(kernel, monkeypatch):
    monkeypatch.setattr(tune, "HEADS", 1)
    tiles, seen = [(16, 32, 4, 1), (32, 16, 4, 1), (64, 64, 8, 3)], []
    before = {name: dict(getattr(flash_attention, name)) for name in ("TILES", "TILES_IN_REGISTERS", "PRECISE_TILES")}

    def clock(call) -> float:
        q = tune.torch.empty(1, 1, 1, 16, dtype=tune.torch.bfloat16)
        seen.append(tuple(flash_attention.tile_sizes(q, kernel).values()))
        if len(seen) == 2:
            raise RuntimeError("out of shared memory\nand more")
        call()
        return 1.0 / len(seen)

    found = tune.trials(16, kernel, tiles, clock, tokens=32)
    assert seen == tiles
    assert [trial.tile for trial in found] == [tiles[2], tiles[0], tiles[1]]
    assert found[2] == tune.Trial(tiles[1], None, "RuntimeError: out of shared memory")
    assert all(getattr(flash_attention, name) == table for name, table in before.items())
