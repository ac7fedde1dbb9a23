"""`--shapes`: every shape is checked against its formula while a layer runs; and which part of weights a rank holds."""

import re
from pathlib import Path

from step08_5d import train
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import run_ranks

SHAPE = "--layers 1 --hidden 16 --heads 4 --kv-heads 2 --ffn 24 --vocab 385 --seq-len 16"
OTHERS = "--global-batch 4 --steps 1 --device cpu --data synthetic --peak-tflops 1 --shapes"
SHOWN = ["--cp 2 --tp 2", "--cp 2 --tp 2 --experts 4 --expert-ffn 20 --ep 4 --zero 3"]
SHOWN += ["--pp 2 --layers 2 --tp 2 --no-sequence-parallel --dtype bfloat16"]
HELD = [*SHOWN[:2], "--tp 4"]


def ranks_train(folder: str) -> list[dict[str, tuple[int, ...]]]:
    """On a rank. Returns the shapes of its weights."""
    held = []
    for number, flags in enumerate(dict.fromkeys(SHOWN + HELD)):
        config = configure(8, f"{SHAPE} {flags} {OTHERS} --run-dir {folder}/{number}")
        pipeline, *_ = train.build(config, mesh_of(config))
        if flags in HELD:
            weights = (each for stage in pipeline.stages for each in stage.named_parameters())
            held.append({name.removeprefix("layers.0."): tuple(each.shape) for name, each in weights})
        if flags in SHOWN:
            train.train(config, mesh_of(config))
    return held


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
    assert re.search(r"layer output .* 2 x 16 x 16, 1,024 bytes", other), "bfloat16"
    for number in range(len(SHOWN)):
        assert Path(tmp_path, str(number), "shapes.png").stat().st_size > 10_000

    def whole(rows: int, heads: int, kv: int, ffn: int) -> dict[str, tuple[int, ...]]:
        """All but the experts: rows of the vocabulary, with padding, widths of the heads, columns of the MLP."""
        shapes = {
            "embedding": (rows, 16),
            "head": (rows, 16),
            "attention_norm": (16,),
            "mlp_norm": (16,),
            "norm": (16,),
        }
        shapes |= {"attention.q_proj": (heads, 16), "attention.k_proj": (kv, 16), "attention.v_proj": (kv, 16)}
        shapes |= {"attention.o_proj": (16, heads)}
        if ffn:
            shapes |= {"mlp.gate_proj": (ffn, 16), "mlp.up_proj": (ffn, 16), "mlp.down_proj": (16, ffn)}
        return {f"{name}.weight": shape for name, shape in shapes.items()}

    # Experts are divided by ep only, and the router not at all
    sparse = {"experts.gate_proj": (1, 20, 16), "experts.up_proj": (1, 20, 16), "experts.down_proj": (1, 16, 20)}
    sparse = {f"mlp.{name}": shape for name, shape in sparse.items()} | {"mlp.router.weight": (4, 16)}
    # A K/V head of width 4 is never cut: two ranks of tp 4 hold copies of each
    expected = [whole(193, 8, 4, 12), whole(193, 8, 4, 0) | sparse, whole(97, 4, 4, 6)]
    assert ranks == [expected] * 4
