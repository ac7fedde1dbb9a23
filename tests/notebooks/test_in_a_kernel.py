"""A lab of each kind, as a student does it in a notebook: with a mistake, a hint, and what is handed in."""

import json
import re
import zipfile
from pathlib import Path

import pytest

from common.labs.cut import bodies_of
from common.labs.find import all_labs
from step08_5d.labs import design_plan
from tests.harness.ranks import ROOT
from tests.notebooks.test_notebooks import LABS, clone, executed
from tests.parity.cases import ALL


def cells_of(id: str, wrong: list[str], right: list[str]) -> list[str]:
    """Those of a student who needs two attempts and a hint."""
    check = f'check("{id}")'
    return [f'start("{id}")', *wrong, check, f'lab("hint", "{id}")', *right, check, check]


def of_each_kind(student: int, folder: Path) -> list[list[str]]:
    labs = all_labs()
    write, predict, hunt, schedule, design = (
        labs[id] for id in ("write-03-a", "predict-02-a", "hunt-02-a", "schedule-05-a", "design-08-b")
    )
    (body,) = bodies_of((ROOT / write.source).read_text())
    unsummed = body.replace("reduce_scatter(dweight)", "dweight.chunk(dist.get_world_size())[dist.get_rank()]")
    (question,) = predict.experiment(student).questions
    (file, ((line, _), *_)), *_ = hunt.places(hunt.bug(student)).items()
    place = f'%%fill hunt-02-a answer.toml\nfile = "{file}"\nwhy = "the # of ranks divides twice"\nline = '
    schedule.write_best(folder, student)
    table = f"%%fill {schedule.id} schedule.csv\n"
    layout = design_plan.best_of(student).layout
    chosen = "\n".join(f"{name} = {getattr(layout, name)}" for name in design.fields)
    return [
        cells_of(write.id, [f"%%fill {write.id}\n{unsummed}"], [f"%%fill {write.id}\n{body}"]),
        cells_of(
            predict.id,
            [f"%%fill {predict.id} answer.toml\n{question.name} = 5"],
            [f"%%fill {predict.id} answer.toml\n{question.name} = {question.expected}"],
        ),
        cells_of(
            hunt.id,
            [f"!bash runs/labs/{hunt.id}/run.sh", f"{place}{line + 40}"],
            [f"{place}{line}", f"%%fill {hunt.id} {file}\n{(ROOT / file).read_text()}"],
        ),
        cells_of(schedule.id, [f"{table}F0,B0"], [table + (folder / "schedule.csv").read_text()]),
        cells_of(design.id, [], [f"%%fill {design.id} answer.toml\n{chosen}"]),
    ]


@pytest.mark.skipif(not ALL, reason="takes minutes: with TEST_ALL=1")
def test_a_lab_of_each_kind_in_a_notebook(tmp_path):
    """First wrong, then right; then it is handed in. Nothing ends in a traceback."""
    student = 7
    copy, book = clone(tmp_path), json.loads(LABS.read_text(encoding="utf-8"))
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"][:2]
    first = "".join(code[0]["source"])
    for field, value in ("NUMBER", student), ("NAME", "Ada"):
        first = first.replace(f'{field} = ""', f"{field} = {value!r}")
    code[0] = {**code[0], "source": first}
    texts = [text for each in of_each_kind(student, tmp_path) for text in each]
    texts += ['lab("submit")', 'lab("check")']
    book["cells"] = [*code, *({**code[0], "id": f"cell{number}", "source": text} for number, text in enumerate(texts))]
    path = copy / "common/notebooks/labs.ipynb"
    path.write_text(json.dumps(book), encoding="utf-8")
    outputs = executed(path, tmp_path)
    printed = "".join(output.get("text", "") for output in outputs)
    assert not any(output["output_type"] == "error" for output in outputs) and "Traceback" not in printed, printed
    for id in ("write-03-a", "predict-02-a", "hunt-02-a", "schedule-05-a", "design-08-b"):
        assert len(re.findall(rf"^{id}: passed", printed, re.MULTILINE)) >= 2, printed[-4000:]
        assert len(re.findall(rf"^{id}: \d+%", printed, re.MULTILINE)) == 1 and "hint 1 of 3" in printed
    assert sum("image/png" in output.get("data", ()) for output in outputs) >= 3
    assert f"submission-{student}.zip" in printed
    with zipfile.ZipFile(copy / f"runs/labs/submission-{student}.zip") as archive:
        assert {"write-03-a/sketch.py", "hunt-02-a/answer.toml", "schedule-05-a/schedule.csv"} <= {*archive.namelist()}
