"""What travels in FP8: tokens to their experts, and weights of ZeRO-3. Bytes are counted, numbers arrive unchanged."""

import torch

from common import collectives
from step08_5d.narrow_numbers.dispatch import Rounded, pack, unpack
from tests.harness.ranks import run_ranks
from tests.mechanisms.step08.test_narrow_numbers import normal, relative
from tests.parity.runs import ADAMW, SMALL, TIED, train_here


def sent(option: str, group: str, flags: str) -> list[list[collectives.Call]]:
    """What this rank sends over a group in one step, without and with this option."""
    found = []
    for given in ("", option):
        with collectives.record() as calls:
            train_here(8, f"{SMALL} {ADAMW} {TIED} --fp8 tile --dtype bfloat16 {flags} {given}")
        found.append([call for call in calls if call.group == group])
    return found


SHAPE = "--hidden 256 --layers 1 --dp 2 --micro-batch 6 --steps 1"


def test_a_dispatch_in_fp8_sends_half_the_bytes():
    """1 byte per number and 4 for each 128 of them, instead of 2 per number. All that comes back is as before."""
    for found in run_ranks(2, sent, "--fp8-dispatch", "ep", f"{SHAPE} --experts 4 --ep 2 --balance none"):
        found = [[(call.phase, call.dtype, call.elements) for call in calls] for calls in found]
        (wide, *others), (narrow, *same) = ([each for each in calls if each[1] != "int64"] for calls in found)
        numbers = wide[2]
        assert wide == ("forward", "bfloat16", numbers) and numbers % 256 == 0
        assert narrow == ("forward", "uint8", numbers // 256 * (256 + 4 * 2))
        assert [each[:2] for each in same] == [each[:2] for each in others] and len(same) == 3


def test_rounded_rows_travel_unchanged():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        rows = Rounded.apply(normal(50, 300).to(dtype))
        arrived = torch.empty_like(rows)
        unpack(pack(rows), arrived)
        assert relative(arrived, rows) < 1e-7 and relative(Rounded.apply(rows), rows) < 1e-7


def test_a_gather_in_fp8_sends_half_the_bytes():
    """1 byte for each number of a matrix, and 2 for those of the two norms. Embedding and last norm are as before."""
    matrices, norms = 256 * (256 + 128 + 128 + 256) + 3 * 256 * 256, 2 * 256
    for found in run_ranks(2, sent, "--fp8-gather", "shard", f"{SHAPE} --ffn 256 --zero 3"):
        before, after = ([(call.dtype, call.elements) for call in calls if call.op == "all_gather"] for calls in found)
        none, maxima = ([call.elements for call in calls if call.op == "all_reduce"] for calls in found)
        layer = ("bfloat16", (matrices + norms) // 2)
        assert before.count(layer) == 2, "the forward and the backward gather the layer"
        assert [("uint8", after[index][1]) if each == layer else each for index, each in enumerate(before)] == after
        for each, (dtype, size) in zip(before, after, strict=True):
            if each == layer:
                assert dtype == "uint8" and layer[1] < size <= layer[1] + norms  # bytes, of what had two per number
        tiles = 2 * 2 + 2 * 2 + 2 * (1 * 2) + 3 * (2 * 2)  # q and o; k and v, which are 128 wide; the MLP
        assert (none, maxima) == ([], [tiles]), "maxima are compared once per step"
