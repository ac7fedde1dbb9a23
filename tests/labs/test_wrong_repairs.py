"""Repairs of a hunt that are right in what run.sh trains, and not in what it does not."""

import pytest

from common.labs.copies import read
from common.labs.find import all_labs
from tests.labs.test_hunts import answer, place, slow

DIES = "off by one, the other way"  # on a token that is then looked up behind the last row
REPAIRS = {  # by lab and variant: a line of the copy, and what somebody makes of it
    DIES: ("hunt-04-a", 2, "self.num_embeddings - 1", "self.num_embeddings + 1"),
    "tokens of one micro-batch": (
        "hunt-01-a", 0, "round(self.lengths.double().mean().item() * self.global_batch)", "int(self.lengths.sum())"
    ),
    "the last one only": ("hunt-01-a", 1, "self.sums[parameter].add(", "self.sums[parameter].copy_("),
    "for two ranks": ("hunt-02-a", 0, "(index + rank)", "(2 * index + rank)"),
    "a mean of two": ("hunt-02-a", 2, "1 / group.size", "2 / group.size"),
    "over the stages of one copy": ("hunt-05-a", 1, "mesh.dp_cp", "mesh.pp_forward"),
    "all who have other tokens": ("hunt-07-a", 0, "mesh.expert_shard.rank", "mesh.dp_cp.rank"),
    "halves are counted once": (
        "hunt-08-a", 0, "parameter.spec.owner = replica.rank == 0",
        "parameter.spec.owner = replica.rank == 0 and mesh.tp.rank == 0",
    ),
    "halves are summed": ("hunt-08-a", 1, "extra_groups=(holders,)", 'extra_groups=("tp", holders)'),
}  # fmt: skip


@slow
@pytest.mark.parametrize("name", REPAIRS)
def test_a_wrong_repair_is_told(name, tmp_path):
    id, student, before, after = REPAIRS[name]
    lab = all_labs()[id]
    bug = lab.bug(student)
    lab.start(tmp_path, student)
    file, _ = place(lab, bug)
    text = read(tmp_path / file)
    assert before in text
    (tmp_path / file).write_text(text.replace(before, after))
    answer(tmp_path, *place(lab, bug))
    found = lab.check(tmp_path, student)
    assert found.score == 0.5 and "fix: not yet. On a training that you have not seen, " in found.feedback[1], found
    assert "failed: " not in found.feedback[1] or name == DIES, "it is wrong because it does not run"
