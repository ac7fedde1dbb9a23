"""The notebooks: stored without results, their commands are ours, and all of their cells run."""

import ast
import json
import os
import re
import shlex
import shutil

import pytest

from common.launching.command_line import STEP_NAMES, parse
from tests.harness.ranks import ROOT
from tests.parity.cases import ALL

NOTEBOOKS = sorted((ROOT / "common/notebooks").glob("*.ipynb"))
SETTINGS = {"MODEL": "--steps 4", "COMMON": "--steps 4 --global-batch 16 --micro-batch 2 --dtype float16 --device cpu"}


def sources(notebook) -> list[str]:
    """The text of its code cells."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def commands(source: str) -> list[list[str]]:
    """The words of each command that a cell runs, with the notebook's settings filled in."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    texts = [node.args[0] for node in calls if isinstance(node.func, ast.Name) and node.func.id == "run"]
    code = [compile(ast.Expression(text), "cell", "eval") for text in texts]
    return [shlex.split(eval(each, {"__builtins__": {}}, SETTINGS)) for each in code]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_its_commands_are_ours_and_nothing_is_stored(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    steps, folders = set(), set()
    for source in sources(notebook):
        for program, *words in commands(source):
            if program == "torchrun":
                assert words[0] == "--nproc_per_node" and words[1].isdecimal()
                words = words[2:]
            if words[0] == "-m":
                assert (ROOT / f"{words[1].replace('.', '/')}.py").is_file()
                assert {word for word in words[2:] if word.startswith("runs/") and "." not in word} <= folders
                continue
            assert (ROOT / words[0]).is_file()
            step = STEP_NAMES.index(words[0].partition("/")[0]) + 1
            steps.add(step)
            folders.add(parse(step, words[1:]).run_dir)
    assert steps >= {1, 2, 5, 8}
    text = notebook.read_text(encoding="utf-8")
    links = re.findall(r"\]\((\.\./[^)#]+)", text)
    assert all((notebook.parent / link).is_file() for link in links)


@pytest.mark.skipif(not ALL, reason="takes minutes: with TEST_ALL=1")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_all_of_its_cells_run(notebook, tmp_path, monkeypatch):
    """In a copy of the project."""
    import nbclient
    import nbformat

    monkeypatch.chdir(tmp_path)
    ignored = shutil.ignore_patterns(".*", "runs", "tests", "__pycache__", "*.egg-info")
    copy = shutil.copytree(ROOT, tmp_path / "clone", ignore=ignored)
    cells = nbformat.read(notebook, as_version=4)
    nbformat.validate(cells)
    folder = str(copy / "common/notebooks")
    client = nbclient.NotebookClient(
        cells, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    with client.setup_kernel(env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}):
        for index, cell in enumerate(cells.cells):
            client.execute_cell(cell, index)
    shown = [output for cell in cells.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", ()) for output in shown) >= 1
    printed = "".join(output.get("text", "") for output in shown)
    assert re.search(r"step +0/", printed) and not re.search(r"\bnan\b", printed) and (copy / "runs").is_dir()
