"""A copy of the project uses its own modules, although Python is told to find those of another place first."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.harness.ranks import ROOT, run_command, torchrun

ALL = os.environ.get("TEST_ALL") == "1"
LINE = "print('modules of', __file__, flush=True)\n"


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """A copy in which common and a step say where they come from, and the environment of an installed original."""
    folder = tmp_path_factory.mktemp("copies")
    packages = ["common", *(path.name for path in ROOT.glob("step*") if path.is_dir())]
    for name in ("original", "copy"):
        for package in packages:
            shutil.copytree(
                ROOT / package, folder / name / package, ignore=shutil.ignore_patterns("*.png", "__pycache__")
            )
        for file in ("common/errors.py", "step01_single_gpu/running/run.py"):
            path = folder / name / file
            path.write_text(f"{path.read_text()}\n\n{LINE}")
    return folder, {"PYTHONPATH": str(folder / "original")}  # as a .pth of an editable installation, but earlier


def modules_of(output: str) -> set[str]:
    return set(re.findall(r"modules of (\S+)", output))


@pytest.mark.parametrize("how", ["script", *(["module", "torchrun", "elsewhere"] if ALL else [])])
def test_a_copy_imports_itself(copies, how, tmp_path):
    folder, environment = copies
    copy, flags = folder / "copy", ["--help"] if how in ("script", "elsewhere") else []
    if how == "torchrun":
        flags = f"--steps 1 --layers 1 --hidden 16 --heads 2 --run-dir {tmp_path}".split()
        done = torchrun(2, "step02_data_parallel/train.py", *flags, cwd=copy, env=environment)
    elif how == "module":
        done = run_command([sys.executable, "-m", "common.labs"], cwd=copy, env=environment)
    else:
        script = copy / "step01_single_gpu" / "train.py"
        done = run_command([sys.executable, script, *flags], cwd=copy if how == "script" else tmp_path, env=environment)
    found = modules_of(done.stdout + done.stderr)
    assert not done.returncode, done.stderr
    assert found and all(path.startswith(str(copy)) for path in found), found


@pytest.mark.skipif(not ALL, reason="needs TEST_ALL=1")
def test_a_lab_of_a_copy_is_about_the_copy(copies, tmp_path):
    folder, environment = copies
    copy, command = folder / "copy", [sys.executable, "-m", "common.labs", "--home", tmp_path]
    done = run_command([*command, "start", "write-04-b"], cwd=copy, env=environment)
    done = run_command([*command, "check"], cwd=copy, env=environment)
    assert done.returncode == 1 and "`forward` is not written yet" in done.stdout, done.stdout + done.stderr
    assert all(path.startswith(str(copy)) for path in modules_of(done.stdout))
    starter = tmp_path / "write-04-b" / "vocab_parallel.py"  # outside of any copy: the installed one
    assert (
        str(folder / "original")
        in subprocess.run(
            [sys.executable, starter], env={**environment, "PATH": ""}, capture_output=True, text=True
        ).stdout
    )
