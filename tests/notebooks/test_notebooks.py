"""The notebooks: stored without results, their commands are ours, and all of their cells run."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import venv
from pathlib import Path

import pytest
import torch

from common.counts import count_parameters
from common.launching.command_line import STEP_NAMES, parse
from common.presets import resolve
from tests.harness.ranks import ROOT
from tests.parity.cases import ALL

NOTEBOOKS = sorted((ROOT / "common/notebooks").glob("*.ipynb"))
SETTINGS = {"MODEL": "--steps 4", "COMMON": "--steps 4 --global-batch 16 --micro-batch 2 --dtype float16 --device cpu"}
# Runs a notebook where it is, and stores what it shows
EXECUTE = """
import pathlib, sys
import nbclient, nbformat
path = pathlib.Path(sys.argv[1])
cells = nbformat.read(path, as_version=4)
place = {"metadata": {"path": str(path.parent)}}
nbclient.NotebookClient(cells, timeout=600, kernel_name="python3", resources=place).execute()
nbformat.write(cells, path)
"""


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


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_packages_are_those_of_the_project(notebook):
    """The cell that installs them asks for the versions of pyproject.toml, and nothing that we do not need."""
    (needed,) = re.findall(r"^NEEDED = (.*)$", sources(notebook)[0], re.MULTILINE)
    least = dict(re.findall(r'^    "([a-z]+)>=([0-9.]+)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for name, version in ast.literal_eval(needed).items():
        assert version == tuple(int(part) for part in f"{least[name]}.0".split(".")[:2]), name


def test_the_first_hour_says_what_it_trains():
    cells = json.loads((ROOT / "common/notebooks/first_hour.ipynb").read_text(encoding="utf-8"))["cells"]
    text = " ".join("".join("".join(cell["source"]) + " " for cell in cells).split())
    config = parse(1, [])
    millions = count_parameters(resolve(config.model)).total / 1e6
    samples, micro_batches = config.global_batch, config.global_batch // config.micro_batch
    for words in (
        f"{millions:.1f} million parameters",
        f"{samples} sequences of {config.seq_len} bytes",
        f"reads {samples // 2} of the same {samples} samples",
        f"all {samples} samples",
        f"(above it is {config.micro_batch}, so there are {micro_batches} micro-batches)",
    ):
        assert words in text


@pytest.mark.skipif(not ALL, reason="takes minutes: with TEST_ALL=1")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_all_of_its_cells_run(notebook, tmp_path):
    """In a copy of the project, by a Python that has the packages, but not the project: as on a lent machine."""
    import ipykernel
    import nbclient
    import nbformat

    ignored = shutil.ignore_patterns(".*", "runs", "tests", "__pycache__", "*.egg-info")
    copy = shutil.copytree(ROOT, tmp_path / "clone", ignore=ignored)
    beside = tmp_path / notebook.name if notebook.stem == "first_hour" else copy / "common/notebooks" / notebook.name
    nbformat.validate(nbformat.read(shutil.copy(notebook, beside), as_version=4))
    venv.create(tmp_path / "env")
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    found = {str(Path(each.__file__).parents[1]) for each in (torch, nbclient, ipykernel)}
    (packages / "found.pth").write_text("\n".join(found))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python, environment["CUDA_VISIBLE_DEVICES"] = tmp_path / "env/bin/python", ""
    subprocess.run([python, "-c", EXECUTE, beside], cwd=tmp_path, env=environment, check=True, timeout=1200)
    shown = [output for cell in nbformat.read(beside, as_version=4).cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", ()) for output in shown) >= 1
    printed = "".join(output.get("text", "") for output in shown)
    assert re.search(r"step +0/", printed) and not re.search(r"\bnan\b", printed) and (copy / "runs").is_dir()
