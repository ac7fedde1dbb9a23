"""`--shapes`: the table and the picture of a layer, in layouts with and without experts."""

import re
from pathlib import Path

from step08_5d import train
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import run_ranks

SHAPE = "--layers 2 --hidden 16 --heads 4 --kv-heads 2 --ffn 24 --seq-len 16 --global-batch 4 --steps 1 --device cpu"
SHAPE += " --data synthetic --peak-tflops 1 --shapes"


def ranks_train(cases: dict[str, str]) -> None:
    """On a rank. Every shape is checked against its formula while the layer runs."""
    for folder, flags in cases.items():
        config = configure(8, f"{SHAPE} {flags} --run-dir {folder}")
        train.train(config, mesh_of(config))


def test_shapes_are_printed_and_drawn(tmp_path, capsys):
    cases = ["--cp 2 --tp 2", "--cp 2 --tp 2 --experts 4 --ep 4 --zero 3", "--pp 2 --tp 2 --no-sequence-parallel"]
    run_ranks(4, ranks_train, {f"{tmp_path}/{number}": flags for number, flags in enumerate(cases)})
    dense, experts, other = capsys.readouterr().out.split("rank 0 talks to")[1:]
    assert "expert" not in dense and "all-to-all over ep (4 ranks)" in experts
    assert re.findall(r"exchange over cp .*", dense) == ["exchange over cp (2 ranks), sends 512 bytes"]  # K and V
    assert "all-reduce over tp" in other and "sp 1 (tp, or 1 without sequence parallelism)" in other
    for number in range(len(cases)):
        assert Path(tmp_path, str(number), "shapes.png").stat().st_size > 10_000
