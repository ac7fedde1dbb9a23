"""Delayed scales: what 16 steps have seen, by hand, and histories in checkpoints of other layouts and recipes."""

import torch

from common.parameter import ParameterSpec
from step07_expert_parallel.experts import Counts
from step08_5d.narrow_numbers import history
from step08_5d.narrow_numbers.experts import ExpertProducts
from step08_5d.narrow_numbers.history import STEPS, History
from step08_5d.narrow_numbers.linear import FORMATS, Products
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import run_ranks, steps_of
from tests.mechanisms.step08.test_narrow_numbers import normal, relative
from tests.parity.runs import ADAMW, SMALL, TIED, assemble, assert_parity, curve_of, train_here

E4M3 = FORMATS["e4m3"]


def test_a_step_that_overflows_leaves_no_history():
    maxima = history_of()
    maxima[:, 0] = torch.tensor([1.0, torch.inf, torch.nan])
    history.finish_step([maxima], mesh_of(configure(8, SMALL, 1)))
    assert maxima[:, 1].tolist() == [1.0, 0.0, 0.0] and not maxima[:, 0].any()


def history_of(*experts: int) -> torch.Tensor:
    made = torch.zeros(*experts, 3, 1 + STEPS)
    made.spec = ParameterSpec("w.largest", tuple(made.shape), tuple((0, size) for size in made.shape), None)
    return made


def check_delayed_scales() -> None:
    """The largest number of 16 steps over 448, by hand: a maximum of 4 x 448 counts for the 16 steps after its own.

    Numbers of the steps, in units of 448: 1, 4, then 2, 1/2, 1/4, 1/8, ... which fall, and always the same weight.
    """
    mesh, maxima = mesh_of(configure(8, SMALL, 1)), history_of()
    noted = History(maxima)
    units = [1.0, 4.0, 2.0, *(2.0**-each for each in range(1, 17)), 0.25]
    expected = [1.0, 1.0, *[4.0] * 16, 2.0, 0.5]  # before step 2 + 16, 4 x 448 has left; before the next, 2 x 448
    found = []
    for unit in units:
        found.append(noted.scales("x", torch.tensor([[1e-3, -448 * unit], [0.0, 100 * unit]]), E4M3).item())
        again = noted.scales("x", torch.tensor([[447 * unit]]), E4M3)  # of another micro-batch, which is smaller
        assert again == found[-1] and noted.scales("weight", torch.tensor([[-448.0]]), E4M3) == 1
        history.finish_step([maxima], mesh)
    assert found == expected
    assert not maxima[2].any(), "nobody has seen a gradient"


def test_delayed_scales_by_hand():
    check_delayed_scales()


def check_idle_expert() -> None:
    """An expert without tokens for 20 steps has the scales of its last ones with tokens, and its gradient no zeros."""
    mesh, maxima = mesh_of(configure(8, SMALL, 1)), history_of(2)
    experts = ExpertProducts(
        [Products("delayed", E4M3, history=History(each), blocks_of_tokens=False) for each in maxima]
    )
    x, dy, weight = normal(6, 32), 1e-6 * normal(6, 48, seed=1), normal(2, 48, 32, seed=2)
    both, one = Counts(torch.tensor([3, 3])), Counts(torch.tensor([6, 0]))
    for counts in (both, *[one] * 20, both):
        experts.output(x, weight, counts), experts.input_gradient(dy, weight, counts)
        dw = torch.empty_like(weight)
        experts.weight_gradient(dy, x, counts)(dw, first=True)
        history.finish_step([maxima], mesh)
    assert [round(float((each == 0).float().mean()), 2) for each in dw] == [0, 0], "numbers that became 0"
    assert relative(dw[1], dy[3:].t() @ x[3:]) < 0.06
    largest = torch.stack([x[3:].abs().max(), weight[1].abs().max(), dy[3:].abs().max()])
    assert torch.equal(maxima[1, :, 1:3], largest[:, None].expand(3, 2)) and not maxima[1, :, 3:].any()


def test_an_idle_expert_keeps_its_history():
    check_idle_expert()


def test_a_checkpoint_without_histories_starts_them(tmp_path, capsys):
    """As the lesson advises: begin in another recipe, go on with delayed scales. One line says so."""
    flags = f"{SMALL} {ADAMW} {TIED} --dtype float32 --micro-batch 12 --save-every 2 --run-dir {tmp_path} --resume auto"
    train_here(8, f"{flags} --steps 2")
    train_here(8, f"{flags} --fp8 delayed --steps 4")
    [line] = [each for each in capsys.readouterr().out.splitlines() if not each.startswith("step ")]
    assert line.startswith("step-00000002 was saved without layers.0.") and line.endswith(
        ".weight.largest and 13 others, which therefore start anew"
    ), line
    assert len(steps_of(tmp_path)) == 4
    train_here(8, f"{flags} --fp8 delayed --steps 6")
    assert "anew" not in capsys.readouterr().out, "the new checkpoint has them"


EXPERTS = "--experts 4 --expert-ffn 24 --shared-experts 1"
CHAIN = [  # ranks and layout of each run, which goes on from the one before: a checkpoint holds the histories
    (1, "--micro-batch 6"),
    (2, "--dp 2 --ep 2 --zero 3 --micro-batch 3"),
    (4, "--tp 2 --pp 2 --ep 2 --micro-batch 3 --schedule dualpipe"),
    (2, "--cp 2 --ep 2 --micro-batch 4 --recompute full"),
]


def train_on(flags: str, folder: str) -> dict:
    flags = f"{SMALL} {ADAMW} {TIED} {EXPERTS} --fp8 delayed --save-every 1 --resume auto --run-dir {folder} {flags}"
    return {"boxes": train_here(8, flags)}


def test_histories_are_saved_and_resumed_in_another_layout(tmp_path):
    steps = len(CHAIN)
    [whole] = run_ranks(1, train_on, f"--micro-batch 12 --steps {steps}", str(tmp_path / "whole"))
    for number, (ranks, layout) in enumerate(CHAIN, start=1):
        parts = run_ranks(ranks, train_on, f"{layout} --steps {number}", str(tmp_path / "chain"))
    curves = [curve_of(tmp_path / name) for name in ("whole", "chain")]
    expected, found = assemble([whole | {"curve": curves[0]}]), assemble([parts[0] | {"curve": curves[1]}, *parts[1:]])
    assert_parity(found, expected, "a chain of layouts", 1e-9)
    histories = {name: each for name, each in found.parameters.items() if name.endswith(".largest")}
    assert len(histories) == 2 * (4 + 3 + 3)  # attention, experts, shared experts of two layers
    for name, each in histories.items():
        assert each.shape[-2:] == (3, 1 + STEPS), name
        seen = each[..., 1 : 1 + steps]
        assert (seen > 0).all() or "experts" in name, f"{name}: what a step has seen"
        assert not each[..., 1 + steps :].any() and not each[..., 0].any(), name
