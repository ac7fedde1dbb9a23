"""What a step in several dimensions costs and shows: by hand, and against what 8 ranks really send and hold."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.costs.vocabulary import KINDS, added
from common.experiments.counting import mean_rank
from common.experiments.training_step import on_every_case
from common.model import Decoder
from common.process_groups import Degrees, Mesh, build_mesh
from step05_pipeline.schedules.catalogue import build_schedule
from step05_pipeline.schedules.simulator import simulate
from step08_5d import cost, shapes, train
from step08_5d.cost import Layout
from step08_5d.experiments import dimensions, nodes
from step08_5d.experiments.tools import DENSE, EXPERTS, FIVE_D, FOUR_D, Training
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import ROOT, run_ranks
from tests.mechanisms import test_formulas as formulas
from tests.mechanisms.test_formulas import by_kind, check
from tests.parity.cases import ALL

# 8 ranks. A layer has 352 parameters, embedding and head 80 each, the last norm 8: 872
THREE_D = formulas.DENSE, Layout(2, dp=2, pp=2, tp=2, micro_batch=2, micro_batches=2)  # micro-batches of 4 tokens
OF_EXPERTS = replace(formulas.EXPERTS, layers=2, dense_layers=0), Layout(4, dp=8, ep=4)
IN_BFLOAT16 = formulas.DENSE, Layout(4, dp=8, zero=1, dtype="bfloat16")
ALONE = THREE_D[0], THREE_D[1]._replace(micro_batches=1)


def bytes_over(group: str, model, layout: Layout, ends: bool = True) -> float:
    return sum(size for (name, _), (_, size) in added(cost.messages(model, layout, ends)).items() if name == group)


def seconds(across: str, micro_batches: int, free: float, on_cable: float) -> float:
    found = SimpleNamespace(free=free, on_cable=Counter(all=on_cable))
    return nodes.predict(micro_batches, {"order": f"tp,cp,{across}"}, found)


BY_HAND = [
    # The stream has 128 bytes: 2·((10 + 4/2)·64 + 48/2), and norms of a layer and half of the last (16 + 4)·4
    (2 * 792 + 80, bytes_over, "tp", *THREE_D),
    (2 * 640 + 64, bytes_over, "tp", *THREE_D, False),  # without ends 10·64, and 16 norms
    (128, bytes_over, "pp_forward", *THREE_D, False),  # without ends: a send for each micro-batch
    (7 / 8 * 872 * (4 + 2), bytes_over, "shard", *IN_BFLOAT16),  # gradients are wide, weights narrow
    (by_kind(872 * 2, 872 * 4, 872 / 8 * 12), cost.held, *IN_BFLOAT16),
    # 160 + 40 + 2·192 + 2·32 = 648 parameters and 960/4 of experts
    ((648, 240), cost.parameters, *OF_EXPERTS),
    ((648, 240), cost.parameters, *OF_EXPERTS, False),  # a single stage has both ends
    ((240, 120), cost.parameters, OF_EXPERTS[0], OF_EXPERTS[1]._replace(pp=2), False),
    ((2 * (32 + 32 + 16 + 32) + 2 * 24 + 8, 60), cost.parameters, OF_EXPERTS[0], OF_EXPERTS[1]._replace(tp=4, ep=16)),
    (2 * 2 / 2 * 1632 / 2, cost.activations, *THREE_D),  # two in flight, a layer of 4 tokens
    (1632 / 2, cost.activations, *ALONE),  # there is no second
    # 3·2·4·(2·336 + 80) for products, and half of 3·2·2·2·4·4·8 for scores; over tp 2 and pp 2, twice 2 sequences of 2
    ({"products": 6 * 2 * (2 * 336 + 80), "attention": 1.5 * 2 * 2 * 2 * 2 * 2 * 8}, cost.operations, *THREE_D),
    (1 / 3, cost.bubble, THREE_D[1]),
    (1 / 5, cost.bubble, THREE_D[1]._replace(stages=2)),
    (5, seconds, "dp", 4, 2, 3),  # 2 + 3; 5/4·3 + 2/4
    (4.25, seconds, "pp", 4, 2, 3),
    (7, seconds, "pp", 4, 7, 3),
]


def test_formulas_by_hand():
    check(BY_HAND)
    for pp, micro_batches in ((2, 4), (4, 8), (8, 1)):
        timeline = simulate(build_schedule("1f1b", pp, micro_batches))
        found = cost.bubble(Layout(4, pp=pp, micro_batches=micro_batches))
        assert found == pytest.approx(timeline.bubble / timeline.makespan)


# ---- counted ---------------------------------------------------------------------------------------------------------

SMALL = {"layers": 4, "hidden": 32, "ffn": 48, "vocab": 256, "seq_len": 16, "global_batch": 2}
TWO_STAGES = {"schedule": "interleaved", "global_batch": 16, "zero": 1}  # of one rank: both have the matrix
CASES = [
    DENSE | FOUR_D | SMALL | {"cp_mode": "allgather", "dtype": "bfloat16"},
    DENSE | FOUR_D | SMALL | {"cp_mode": "ulysses", "kv_heads": 2},  # fewer heads on a rank than cp
    DENSE | SMALL | {"pp": 2, "zero": 3, "global_batch": 8},
    EXPERTS | FIVE_D | SMALL | {"expert_ffn": 16, "zero": 1, "mtp": 1, "latent": "24,16,8,4,10"},
    DENSE | SMALL | {"zero": 3, "global_batch": 16},  # two micro-batches
    EXPERTS | SMALL | {"ep": 4, "expert_ffn": 16, "zero": 2, "global_batch": 16, "shared_experts": 1, "tp": 2},
]
FURTHER = [
    EXPERTS | FIVE_D | SMALL | {"expert_ffn": 16, "zero": 1},
    EXPERTS | FIVE_D | SMALL | {"expert_ffn": 16, "zero": 1, "mtp": 1},
    DENSE | SMALL | {"zero": 3, "global_batch": 16, "mtp": 1},
    DENSE | FOUR_D | SMALL | {"latent": "24,16,8,4,10", "zero": 1},
    DENSE | SMALL | {"cp": 2, "tp": 4, "cp_mode": "ulysses", "heads": 8, "latent": "0,16,8,4,10", "kv_heads": 8},
    DENSE | SMALL | TWO_STAGES | {"mtp": 1, "tie_embeddings": False},
    DENSE | SMALL | TWO_STAGES | {"tie_embeddings": True},
]
CASES += FURTHER if ALL else []


def ranks_measure(cases: list[dict]) -> list[dict]:
    """On a rank."""
    mesh = build_mesh(Degrees(dp=8), torch.device("cpu"))
    return on_every_case(mesh, lambda: None, sent_and_held, cases)


def sent_and_held(mesh: Mesh, flags: dict) -> dict:
    return dimensions.sent_and_held(Training(mesh, **flags))


def test_what_ranks_send_and_hold():
    ranks = run_ranks(8, ranks_measure, CASES)
    for index, flags in enumerate(CASES):
        model, layout = dimensions.layout_of(flags)
        found = mean_rank(rank[index]["counted"] for rank in ranks).sent
        for key, (number, size) in added(cost.messages(model, layout)).items():
            assert found[key][1] == pytest.approx(size, rel=1e-12), (key, flags)
            assert "shard" in key[0] or found[key][0] == number, (key, flags)  # which has buckets
        beside = set(found) - set(added(cost.messages(model, layout)))  # the norm, the loss, loads of experts
        assert all(found[key][1] < 700 for key in beside), (beside, flags)
        for kind, size in cost.held(model, layout).items():
            mean = sum(rank[index]["held"][kind] for rank in ranks) / 8
            assert kind in KINDS and mean == pytest.approx(size, rel=1e-2), (kind, flags)


# ---- `--shapes` ------------------------------------------------------------------------------------------------------

SHAPE = "--layers 1 --hidden 16 --heads 4 --kv-heads 2 --ffn 24 --vocab 385 --seq-len 16"
OTHERS = "--global-batch 4 --steps 1 --device cpu --data synthetic --peak-tflops 1 --shapes"
SHOWN = ["--cp 2 --tp 2 --mtp 1", "--cp 2 --tp 2 --experts 4 --expert-ffn 20 --ep 4 --zero 3"]
SHOWN += ["--pp 2 --layers 2 --tp 2 --no-sequence-parallel --dtype bfloat16 --kv-heads 1"]
SHOWN += ["--cp 2 --tp 2 --kv-heads 4 --latent 12,8,6,4,10"]


def ranks_train(folder: str) -> None:
    for number, flags in enumerate(SHOWN):
        config = configure(8, f"{SHAPE} {flags} {OTHERS} --run-dir {folder}/{number}")
        train.train(config, mesh_of(config))


def test_shapes_are_checked_and_printed_and_drawn(tmp_path, capsys):
    run_ranks(4, ranks_train, str(tmp_path))
    dense, experts, other, latent = capsys.readouterr().out.split("rank 0 talks to")[1:]
    assert "expert" not in dense and "all-to-all over ep (4 ranks)" in experts
    assert re.findall(r"exchange over cp .*", dense) == ["exchange over cp (2 ranks), sends 512 bytes"]  # K and V
    assert re.search(r"values +\(b, a_kv/tp, s/cp, d\) +2 x 1 x 8 x 4, 256 bytes", dense)
    for told in ("reduce of counts over tp (2 ranks), sends 64", "to-all of counts over ep (4 ranks), sends 24"):
        assert told in experts  # integers of 8 bytes: 2 sequences x 4 experts, and 3/4 of 4 experts
    assert "all-reduce over tp" in other and re.search(r"layer output +\(b, s/cp, h\)", other), "tokens are not divided"
    assert re.search(r"layer output +\(b, s/cp/tp, h\)", dense)
    assert re.search(r"layer output .* 2 x 16 x 16, 1,024 bytes", other), "bfloat16"
    weights = ("embedding", "(v/tp, h)", "193 x 16"), ("attention.k_proj", "(a_kv/tp*d, h)", "4 x 16")  # 385 are padded
    for shown in (dense, experts, other):  # a K/V head for each of two ranks, or one for both
        for name, formula, shape in weights:
            assert re.search(rf"{re.escape(name)} +{re.escape(formula)} +{shape}, ", shown), (name, shown)
    assert re.search(r"mlp.experts.down_proj +\(E/ep, h, fe\) +1 x 16 x 20, 1,280 bytes", experts)
    assert "  head  " in dense and "  head  " not in other  # which is the first of two stages
    for line in (
        r"attention.kv_a_proj +\(c\+r, h\) +12 x 16",
        r"attention.kv_b_proj +\(a/tp\*dn\+a/tp\*dv, c\) +32 x 8",
    ):
        assert re.search(line + ", ", latent)
    assert re.search(r"latents +\(b, 1, s/cp, c\) +2 x 1 x 8 x 8, 512 bytes", latent)
    assert re.findall(r"exchange over cp .*", latent) == [
        "exchange over cp (2 ranks), sends 768 bytes"
    ]  # 8 + 4 numbers
    for number in range(len(SHOWN)):
        assert Path(tmp_path, str(number), "shapes.png").stat().st_size > 10_000


@pytest.mark.parametrize("flags, wrong", [("--tp 2", "embedding.weight: (385, 16), but (v/tp, h) is (193, 16)")])
def test_a_weight_that_is_not_what_its_formula_says(flags, wrong):
    config = configure(8, f"{SHAPE} {flags} {OTHERS}", 2)
    model = Decoder(config.model_config)  # nobody has divided it
    with pytest.raises(AssertionError, match=re.escape(wrong)):
        shapes.check_weights([model], config)
    config.tp = 1
    assert len(shapes.check_weights([model], config)) == 9 + 3
    model.layers["0"].mlp.more = torch.nn.Linear(2, 2)
    with pytest.raises(AssertionError, match="layers.0.mlp.more.weight has no formula"):
        shapes.check_weights([model], config)


def test_files_that_ask_for_a_dimensions_groups():
    """The row of dimensions.md, against the code of the mechanisms."""
    page = (ROOT / "step08_5d" / "dimensions.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith("| files of a mechanism")]
    groups = "pp_forward|pp_backward", "cp", "tp|kv_replica", "ep"
    mechanisms = [path for path in ROOT.glob("step*/**/*.py") if path.name != "train.py"]
    mechanisms = {path: path.read_text() for path in mechanisms if not {"experiments", "labs"} & {*path.parts}}
    for cell, names in zip(row.split("|")[2:-1], groups, strict=True):
        listed = [(step, name) for step, some in re.findall(r"step (\d): ([^;]*)", cell) for name in some.split(", ")]
        asking = [path for path, text in mechanisms.items() if re.search(rf"mesh\.({names})\b", text)]
        found = [(path.relative_to(ROOT).parts[0][5], f"`{path.name}`") for path in asking]
        assert sorted((step, name.strip()) for step, name in listed) == sorted(found), names
