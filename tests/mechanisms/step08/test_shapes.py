"""`--shapes`: every shape is checked against its formula while a layer runs."""

import re
from pathlib import Path

from step08_5d import train
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import run_ranks

SHAPE = "--layers 1 --hidden 16 --heads 4 --kv-heads 2 --ffn 24 --vocab 385 --seq-len 16"
OTHERS = "--global-batch 4 --steps 1 --device cpu --data synthetic --peak-tflops 1 --shapes"
SHOWN = ["--cp 2 --tp 2", "--cp 2 --tp 2 --experts 4 --expert-ffn 20 --ep 4 --zero 3"]
SHOWN += ["--pp 2 --layers 2 --tp 2 --no-sequence-parallel --dtype bfloat16"]


def ranks_train(folder: str) -> None:
    for number, flags in enumerate(SHOWN):
        config = configure(8, f"{SHAPE} {flags} {OTHERS} --run-dir {folder}/{number}")
        train.train(config, mesh_of(config))


def test_shapes_are_checked_and_printed_and_drawn(tmp_path, capsys):
    run_ranks(4, ranks_train, str(tmp_path))
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
