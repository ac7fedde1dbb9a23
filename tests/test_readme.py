"""The commands that README.md and the lessons show are run: every line of every ```bash block.

A lesson's commands run in its order, two lessons side by side. To save torchrun's start, its trainings run on ranks
that are forked, through the same parser, checks and `train`; with TEST_ALL=1, and once for each lesson in any case, the
command runs as it is written.
"""

import os
import re
import shlex
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness.ranks import ROOT, run_command, run_ranks
from tests.parity.runs import train_here

READMES = [ROOT / "README.md", *sorted(ROOT.glob("step*/README.md"))]
BY_HAND = ("make ", "git ", "source ", "cd ")  # `make test` runs this test; the others set up what runs it
FORKED = threading.Lock()  # there is one fork server


def commands(readme: Path) -> list[str]:
    """Lines of the ```bash blocks, continued lines joined. Blocks of other kinds (console, text) are not run."""
    blocks = re.findall(r"^```bash\n(.*?)^```", readme.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return list(dict.fromkeys(line for line in lines if line and not line.startswith(("#", *BY_HAND))))


COMMANDS = {readme: commands(readme) for readme in READMES}
CASES = [(readme, command) for readme in READMES for command in COMMANDS[readme]]


def train_on_a_rank(script: str, flags: list[str]) -> None:
    os.chdir(ROOT)
    train_here(int(script[4:6]), " ".join(flags))


def run_as_written(command: str) -> None:
    words = shlex.split(command)
    environment = {"PET_STANDALONE": "1"}  # torchrun takes a free port, so that runs side by side do not meet
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    assert words[0] in ("python", "torchrun", "diff"), f"{words[0]} cannot be run here"
    python = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "torch.distributed.run"]
    done = run_command([*python, *words[1:]] if words[0] != "diff" else words, timeout=240, env=environment)
    assert done.returncode in ((0, 1) if words[0] == "diff" else (0,)), f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def run_lesson(readme: Path) -> dict[str, Exception | None]:
    """What each command of a lesson failed with."""
    outcome, launched = {}, bool(os.environ.get("TEST_ALL"))
    for command in COMMANDS[readme]:
        training = re.search(r"torchrun --nproc_per_node (\d+) (step\S+/train\.py) ?(.*)", command)
        outcome[command] = None
        try:
            if training and (launched and not os.environ.get("TEST_ALL")):
                with FORKED:
                    run_ranks(int(training[1]), train_on_a_rank, training[2], training[3].split(), timeout=240)
            else:
                launched |= bool(training)
                run_as_written(command)
        except Exception as error:  # the test of this command shows it
            outcome[command] = error
    return outcome


@pytest.fixture(scope="module")
def outcomes() -> dict[Path, dict[str, Exception | None]]:
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(READMES, pool.map(run_lesson, READMES), strict=True))


@pytest.mark.parametrize(("readme", "command"), CASES, ids=[f"{path.parent.name}: {line}" for path, line in CASES])
def test_command_of_a_readme_works(outcomes, readme, command):
    if outcomes[readme][command] is not None:
        raise outcomes[readme][command]


def test_the_lessons_show_commands():
    assert all(COMMANDS[readme] for readme in READMES[1:])


@pytest.mark.parametrize("readme", READMES, ids=[str(path.relative_to(ROOT)) for path in READMES])
def test_links_and_pictures_exist(readme):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", readme.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (readme.parent / target).exists(), f"{readme.name} points to {target}"
