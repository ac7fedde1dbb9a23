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
from common.errors import UsageError
from common.labs import notebook
from common.labs.cut import bodies_of
from common.labs.find import all_labs
from common.launching.command_line import STEP_NAMES, parse
from common.presets import resolve
from tests.harness.ranks import ROOT
from tests.parity.cases import ALL

NOTEBOOKS = [ROOT / "common/notebooks" / f"{name}.ipynb" for name in ("first_hour", "two_gpus")]  # which train
LABS = ROOT / "common/notebooks/labs.ipynb"
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


@pytest.mark.parametrize("notebook", [*NOTEBOOKS, LABS], ids=lambda path: path.stem)
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


def test_each_step_has_a_lab_to_start_fill_and_check():
    cells = json.loads(LABS.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    code = [
        re.findall(r"^(?:start|check)\(\"(\S+)\"\)|^%%fill (\S+)", each, re.MULTILINE) for each in sources(LABS)[2:-1]
    ]
    assert all(len(each) == 1 for each in code)
    ids = ["".join(each[0]) for each in code]
    for step in range(1, 9):
        first = next(lab for lab in all_labs().values() if lab.step == step and lab.kind == "write")
        assert ids.count(first.id) == 2 + len(first.bodies)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({}, []),
        ({"NUMBER": "7", "NAME": "Ada L."}, ["--student", "7", "--name", "Ada L."]),
        ({"NUMBER": 0}, ["--student", "0"]),
    ],
)
def test_number_and_name_are_fields_and_nothing_is_handed_in_unasked(fields, words, monkeypatch):
    """They stand in the first cell, empty; the second one tells the labs; the last one hands in, once it is said to."""
    first, second, *_, last = sources(LABS)
    given = {name: ast.literal_eval(re.search(f"^{name} = (.*?)  #", first, re.M)[1]) for name in ("NUMBER", "NAME")}
    assert given == {"NUMBER": "", "NAME": ""}
    done = []
    monkeypatch.setattr(notebook, "_do", lambda words: done.append(words))
    exec(second, given | fields)
    assert done == [words]
    exec(last, {"lab": notebook.lab})
    assert done == [words]
    exec(last.removeprefix("# "), {"lab": notebook.lab})
    assert done == [words, ["submit"]]


def test_a_cell_fills_a_gap(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(notebook, "home", tmp_path)
    with pytest.raises(UsageError, match="has not been started"):
        notebook.fill("write-01-a 2", "")
    folder = tmp_path / "write-01-a"
    folder.mkdir()
    all_labs()["write-01-a"].start(folder, 1)
    notebook.fill("write-01-a 2", "x = 1\nif x:\n    x = 2\n")
    notebook.fill("write-01-a", "  y = 1\n")
    assert "line " in capsys.readouterr().out
    found = bodies_of((folder / "sketch.py").read_text(encoding="utf-8"))
    assert found == ["y = 1\n", "x = 1\nif x:\n    x = 2\n"]
    notebook.fill("write-01-a", "raise NotImplementedError\n")
    assert "still to be written" in capsys.readouterr().out
    for line, message in (
        ("write-01-a 3", "no gap 3"),
        ("write-01-a ../x.toml", "must be the name"),
        ("", "which lab"),
    ):
        with pytest.raises(UsageError, match=message):
            notebook.fill(line, "x")


def executed(path: Path, folder: Path) -> list[dict]:
    """What a notebook shows, run by a Python that has the packages, but not the project: as on a lent machine."""
    import ipykernel
    import nbclient
    import nbformat

    nbformat.validate(nbformat.read(path, as_version=4))
    venv.create(folder / "env")
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    found = {str(Path(each.__file__).parents[1]) for each in (torch, nbclient, ipykernel)}
    (packages / "found.pth").write_text("\n".join(found))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python, environment["CUDA_VISIBLE_DEVICES"] = folder / "env/bin/python", ""
    subprocess.run([python, "-c", EXECUTE, path], cwd=folder, env=environment, check=True, timeout=1200)
    return [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", ())]


def clone(folder: Path) -> Path:
    ignored = shutil.ignore_patterns(".*", "runs", "tests", "__pycache__", "*.egg-info")
    return shutil.copytree(ROOT, folder / "clone", ignore=ignored)


@pytest.mark.skipif(not ALL, reason="takes minutes: with TEST_ALL=1")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_all_of_its_cells_run(notebook, tmp_path):
    copy = clone(tmp_path)
    beside = tmp_path / notebook.name if notebook.stem == "first_hour" else copy / "common/notebooks" / notebook.name
    shown = executed(shutil.copy(notebook, beside), tmp_path)
    assert sum("image/png" in output.get("data", ()) for output in shown) >= 1
    printed = "".join(output.get("text", "") for output in shown)
    assert re.search(r"step +0/", printed) and not re.search(r"\bnan\b", printed) and (copy / "runs").is_dir()


@pytest.mark.skipif(not ALL, reason="takes minutes: with TEST_ALL=1")
def test_labs_are_solved_in_a_notebook(tmp_path):
    """Cells as a student fills them, with our bodies: all eight labs pass. As they are stored, none does."""
    copy, labs = clone(tmp_path), all_labs()
    cells = json.loads(LABS.read_text(encoding="utf-8"))
    for cell in cells["cells"]:
        head, _, _ = "".join(cell["source"]).partition("\n")
        if match := re.fullmatch(r"%%fill (\S+) ?(\d*)", head):
            lab = labs[match[1]]
            body = bodies_of((ROOT / lab.source).read_text(encoding="utf-8"))[lab.bodies[int(match[2] or 1) - 1] - 1]
            cell["source"] = [f"{head}\n{body}"]
    path = copy / "common/notebooks/labs.ipynb"
    path.write_text(json.dumps(cells), encoding="utf-8")
    printed = "".join(output.get("text", "") for output in executed(path, tmp_path))
    assert len(re.findall(r"^write-0\d-a: passed", printed, re.MULTILINE)) == 8, printed[-4000:]
