"""The programs of common/your_own_model.md run, and print the same on one process and on two."""

import re

import pytest

from tests.harness.ranks import ROOT, run_script

PAGE = ROOT / "common" / "your_own_model.md"
BEGINNING = "What all examples begin with"


def programs() -> dict[str, str]:
    """The code of each section that has some, by its title."""
    _, *sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = {}
    for section in sections:
        blocks = re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
        if blocks:
            found[section.partition("\n")[0]] = "\n".join(blocks)
    return found


PROGRAMS = programs()
SECTIONS = [title for title in PROGRAMS if title != BEGINNING]


def test_the_page_has_programs():
    assert BEGINNING in PROGRAMS and SECTIONS


@pytest.mark.parametrize("title", SECTIONS)
def test_a_program_prints_the_same_on_one_process_and_on_two(title, tmp_path):
    path, printed = tmp_path / "program.py", []
    path.write_text(f"{PROGRAMS[BEGINNING]}\n{PROGRAMS[title]}", encoding="utf-8")
    for ranks in (1, 2):
        done = run_script(path, ranks=ranks, module="tests.foreign.models")  # which has transformers imported once
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("loss ")]
        assert len(lines) == ranks, done.stdout
        printed += [[float(number) for number in re.findall(r"\d+\.\d+", line)] for line in lines]
    assert len(printed[0]) == 2, "the loss and the gradient norm"
    for numbers in printed[1:]:
        assert numbers == pytest.approx(printed[0], abs=2e-5), title
