"""`--shapes`, the table and the picture of a layer; and which part of every weight a rank holds."""

import math
import re
from pathlib import Path

from step08_5d import train
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import run_ranks

SHAPE = "--layers 2 --hidden 16 --heads 4 --kv-heads 2 --ffn 24 --expert-ffn 20 --vocab 385 --seq-len 16"
DENSE = SHAPE.replace("--expert-ffn 20 ", "")
OTHERS = "--global-batch 4 --steps 1 --device cpu --data synthetic --peak-tflops 1 --shapes"
SHOWN = ["--cp 2 --tp 2", "--cp 2 --tp 2 --experts 4 --ep 4 --zero 3"]
SHOWN += ["--pp 2 --tp 2 --no-sequence-parallel --dtype bfloat16"]
HELD = ["--dp 2 --tp 2 --experts 4 --ep 2 --shared-experts 1", "--tp 4"]


def ranks_train(folder: str) -> list[dict[str, tuple[int, ...]]]:
    """On a rank. Every shape is checked against its formula while the layer runs. Returns the shapes of its weights."""
    held = []
    for number, flags in enumerate(SHOWN + HELD):
        config = configure(8, f"{SHAPE if 'experts' in flags else DENSE} {flags} {OTHERS} --run-dir {folder}/{number}")
        pipeline, *_ = train.build(config, mesh_of(config))
        held.append({name: tuple(each.shape) for stage in pipeline.stages for name, each in stage.named_parameters()})
        if flags in SHOWN:
            train.train(config, mesh_of(config))
    return held


def layers_of(attention: dict, mlp: dict, numbers: list[int]) -> dict[str, tuple[int, ...]]:
    """The weights of some layers, by name. Their norms are whole."""
    shapes = {f"attention.{name}_proj.weight": shape for name, shape in attention.items()}
    shapes |= {f"mlp.{name}": shape for name, shape in mlp.items()}
    shapes |= {"attention_norm.weight": (16,), "mlp_norm.weight": (16,)}
    return {f"layers.{number}.{name}": shape for number in numbers for name, shape in shapes.items()}


def projections(kind: str, *shapes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return dict(zip((f"gate_proj{kind}", f"up_proj{kind}", f"down_proj{kind}"), shapes, strict=True))


def test_shapes_are_printed_and_drawn_and_weights_divided(tmp_path, capsys):
    """Worked by hand, for 4 heads and 2 K/V heads of width 4: dp and cp divide no weights, ep divides experts only."""
    ranks = run_ranks(4, ranks_train, str(tmp_path))
    dense, experts, other = capsys.readouterr().out.split("rank 0 talks to")[1:]
    assert "expert" not in dense and "all-to-all over ep (4 ranks)" in experts
    assert re.findall(r"exchange over cp .*", dense) == ["exchange over cp (2 ranks), sends 512 bytes"]  # K and V
    assert re.search(r"values +\(b, a_kv/tp, s/cp, d\) +2 x 1 x 8 x 4, 256 bytes", dense)
    for told in ("reduce of counts over tp (2 ranks), sends 64", "to-all of counts over ep (4 ranks), sends 24"):
        assert told in experts  # integers of 8 bytes: 2 sequences x 4 experts, and 3/4 of 4 experts
    assert "all-reduce over tp" in other and "sp 1 (tp, or 1 without sequence parallelism)" in other
    for text, numbers in ((dense, {4}), (experts, {4, 8}), (other, {2})):  # bytes of a number; which experts: 8
        held = re.findall(r"\) +([\d x]+), ([\d,]+) bytes", text)
        assert {int(size.replace(",", "")) / math.prod(map(int, each.split(" x "))) for each, size in held} == numbers
    for number in range(len(SHOWN)):
        assert Path(tmp_path, str(number), "shapes.png").stat().st_size > 10_000

    halves = {"q": (8, 16), "k": (4, 16), "v": (4, 16), "o": (16, 8)}  # a head of width 4 is never cut: two ranks of
    quarters = {"q": (4, 16), "k": (4, 16), "v": (4, 16), "o": (16, 4)}  # tp 4 hold copies of each K/V head
    mlp = projections(".weight", (12, 16), (12, 16), (16, 12))
    embedding = {"embedding.weight": (193, 16)}  # 385 words and a padded one on two ranks
    end = {"norm.weight": (16,), "head.weight": (193, 16)}

    def sparse(count: int, shared: int) -> dict:
        """Experts are divided by ep only, and the router and shared experts not at all."""
        of_experts = projections("", (count, 20, 16), (count, 20, 16), (count, 16, 20))
        result = {"router.weight": (4, 16)} | {f"experts.{name}": shape for name, shape in of_experts.items()}
        for name, shape in projections(".weight", (20, 16), (20, 16), (16, 20)).items() if shared else ():
            result[f"shared.{name}"] = shape
        return result

    whole = embedding | end
    assert [rank[0] for rank in ranks] == [whole | layers_of(halves, mlp, [0, 1])] * 4
    assert [rank[1] for rank in ranks] == [whole | layers_of(halves, sparse(1, shared=0), [0, 1])] * 4
    assert [rank[2] for rank in ranks[:2]] == [embedding | layers_of(halves, mlp, [0])] * 2
    assert [rank[2] for rank in ranks[2:]] == [end | layers_of(halves, mlp, [1])] * 2
    assert [rank[3] for rank in ranks] == [whole | layers_of(halves, sparse(2, shared=1), [0, 1])] * 4
    of_four = {"embedding.weight": (97, 16), "norm.weight": (16,), "head.weight": (97, 16)}
    thin = projections(".weight", (6, 16), (6, 16), (16, 6))
    assert [rank[4] for rank in ranks] == [of_four | layers_of(quarters, thin, [0, 1])] * 4
