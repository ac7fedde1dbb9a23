"""The first cell of the labs' notebook: which clone it makes, and at which commit."""

import subprocess
import sys
from pathlib import Path

from tests.notebooks.test_notebooks import LABS, sources


def git(folder: Path, *words: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", folder, *names, *words], capture_output=True, check=True, text=True)
    return done.stdout.strip()


def test_the_first_cell_clones_the_commit_that_a_teacher_names(tmp_path):
    """Also if it is run twice, with another commit, and with one that came later than the clone."""
    origin, beside = tmp_path / "origin", tmp_path / "beside"
    (origin / "step01_single_gpu").mkdir(parents=True)
    beside.mkdir()
    git(tmp_path, "init", "--quiet", str(origin))
    commits = []

    def grow(number: int) -> None:
        (origin / "step01_single_gpu" / "train.py").write_text(f"{number}\n")
        git(origin, "add", ".")
        git(origin, "commit", "--quiet", "-m", f"{number}")
        commits.append(git(origin, "rev-parse", "--short=12", "HEAD"))

    def run(repository: str, commit: str) -> subprocess.CompletedProcess:
        code = sources(LABS)[0].replace('REPOSITORY = ""', f"REPOSITORY = {repository!r}")
        code = code.replace('COMMIT = ""', f"COMMIT = {commit!r}").split("NEEDED = ")[0]
        words = [sys.executable, "-c", f"exec({code!r})\nexec({code!r})"]
        return subprocess.run(words, cwd=beside, capture_output=True, text=True)

    def cloned() -> str:
        return git(beside / "project", "rev-parse", "--short=12", "HEAD")

    grow(1)
    grow(2)
    for commit in (commits[0], "", commits[1]):
        assert run(str(origin), commit).returncode == 0
        assert cloned() == (commit or commits[0]), "an existing clone stays where it is, unless a commit is named"
        assert not (beside / "project" / "project").exists()
    grow(3)
    assert run(str(origin), commits[2]).returncode == 0 and cloned() == commits[2]
    wrong = run(str(origin), "f" * 12).stderr.splitlines()[-1]
    assert wrong.startswith("AssertionError: ") and wrong.endswith("project cannot go to commit ffffffffffff")
    beside = tmp_path / "nowhere"
    beside.mkdir()
    assert "there is nothing to clone at" in run(str(tmp_path / "none"), "").stderr
    assert "write the project's address" in run("", "").stderr
