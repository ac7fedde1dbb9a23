"""What a student is handed fits into a terminal of 120 columns."""

import pytest

from common.labs.design import Design
from common.labs.find import all_labs
from common.labs.predict import Predict
from step05_pipeline.labs.tables import Tables

WIDTH = 120
LABS = all_labs()


@pytest.mark.parametrize("id", LABS)
def test_tasks(id):
    assert not [line for line in LABS[id].task.splitlines() if len(line) > WIDTH]


@pytest.mark.parametrize("id", [id for id, lab in LABS.items() if isinstance(lab, (Predict, Tables, Design))])
def test_files_to_be_filled_in(id, tmp_path):
    """And what predict labs calculate in their solutions."""
    for student in range(12):
        LABS[id].start(tmp_path, student)
        (file,) = tmp_path.iterdir()
        text = file.read_text()
        if isinstance(LABS[id], Predict):
            text += LABS[id].solution(student)
        assert not [line for line in text.splitlines() if len(line) > WIDTH], student
