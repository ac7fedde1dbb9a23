"""`python -m common.groups`: its groups are those that the ranks of a run with the same flags communicate in."""

import json
import shlex
from dataclasses import asdict

import pytest
import torch

from common import groups
from common.drawing.groups import EXAMPLE, letter
from common.errors import UsageError
from common.launching.run_mesh import mesh_of
from tests.harness.observing import configure
from tests.unit.test_process_groups import one_rank_of

RUNS = (  # flags of step 8's train.py and of the command, ranks, a rank
    ("--tp 2 --cp 2 --pp 2 --experts 8 --ep 4 --zero 1 --zero-replicas 2", 16, 5),
    ("--tp 4 --pp 2 --heads 4 --kv-heads 2 --order pp,tp,cp,dp", 16, 13),
    ("--cp 2 --zero 3 --experts 8", 8, 3),
)


def shown(capsys, flags: str) -> tuple[int, str, str]:
    return groups.main(shlex.split(flags)), *capsys.readouterr()


@pytest.mark.parametrize(("flags", "world", "rank"), RUNS)
def test_a_rank_of_a_run_has_these_groups(flags, world, rank, capsys):
    config = configure(8, f"{flags} --global-batch 32", world)
    with one_rank_of(world, rank):
        mesh = mesh_of(config, torch.device("cpu"))
    known = flags.replace("--heads 4 ", "")  # the command knows no shape of the model but this one
    status, out, _ = shown(capsys, f"--world {world} {known} --rank {rank}")
    lines = [line.split() for line in out.splitlines()]
    listed = {name: tuple(map(int, ranks)) for name, _, *ranks in lines[2:] if ranks and ranks[0].isdecimal()}
    assert status == 0 and {"tp", "cp", "pp"} & listed.keys()
    for name, ranks in listed.items():
        assert getattr(mesh, {"pp": "pp_forward"}.get(name, name)).ranks == ranks, name
    (alone,) = [line for line in out.splitlines() if line.startswith("alone")]
    unused = {"ep", "edp", "expert_shard", "expert_replica"} if not mesh.degrees.experts else set()
    for name in alone.partition(": ")[2].split(", "):
        assert name in unused or getattr(mesh, {"pp": "pp_forward"}.get(name, name)).size == 1, name


def test_the_table_has_a_line_for_each_rank_and_takes_a_run(capsys, tmp_path):
    flags = "--world 16 --tp 2 --cp 2 --pp 2 --ep 4 --zero 1 --zero-replicas 2"
    status, out, _ = shown(capsys, flags)
    rows = [line for line in out.splitlines()[1:] if line[0].isdecimal()]
    assert status == 0 and len(rows) == 16
    assert rows[5].split()[:6] == ["5", "0", "0", "1", "0", "1"], "rank, node, and its place in dp, pp, cp and tp"
    assert all(f" {cell} " in f"{rows[5]} " for cell in ("4 5", "5 7", "1 5", "5 13", "5 7 13 15", "4 5 6 7"))
    facts = {"degrees": asdict(EXAMPLE), "model_config": {"kv_heads": 4}}
    (tmp_path / "config.json").write_text(json.dumps(facts))  # where a tuple becomes a list
    assert shown(capsys, str(tmp_path))[1] == out
    assert groups.degrees_of_run(str(tmp_path)) == (EXAMPLE, 4)
    assert groups.shortened(tuple(range(0, 64, 8))) == "0 8 .. 56 (8)"
    assert [letter(each) for each in (0, 25, 26, 27, 702)] == ["a", "z", "aa", "ab", "aaa"]


@pytest.mark.parametrize(
    "flags",
    [
        "--tp 3",
        "--tp 2 --dp 4",
        "--tp 2 --zero 1 --zero-replicas 3",
        "--zero-replicas 2",
        "--experts 8 --ep 3",
        "--experts 12 --ep 12 --pp 2",
        "--order tp,cp,pp",
        "--tp 4 --kv-heads 6",
    ],
)
def test_what_training_refuses_the_command_refuses_in_the_same_words(flags, capsys):
    with pytest.raises(UsageError) as refused:
        configure(8, f"{flags} --heads 12 --hidden 96 --global-batch 32", 16)
    assert shown(capsys, f"--world 16 {flags}") == (2, "", f"error: {refused.value}\n")


def test_other_bad_sizes_get_one_line(capsys, tmp_path):
    for flags in (
        "",
        "--world 0",
        "--world x",
        "--world 8 --rank 8",
        "--world 8 --node 0",
        "--world 8 --tp -1",
        f"--world {1 << 40}",
        str(tmp_path),
        f"{tmp_path} --tp 2",
        "--world 2 --plot x.nothing",
        f"--world 2 --plot {tmp_path}/x",
        "--world 1 --plot x.png",
    ):
        status, _, err = shown(capsys, flags)
        assert status == 2 and err.startswith("error: ") and err.count("\n") == 1, (flags, err)
        assert "--plot" not in flags or "end in .png" in err or "nothing to draw" in err
    assert not [*tmp_path.iterdir()]


def test_pictures_of_any_size(capsys, tmp_path):
    for flags in ("--world 6 --pp 3 --node 4", "--world 512 --tp 8 --pp 4"):
        assert shown(capsys, f"{flags} --plot {tmp_path}/groups.png")[0] == 0
        assert (tmp_path / "groups.png").stat().st_size > 2000
