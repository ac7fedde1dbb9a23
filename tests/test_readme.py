"""The commands that the lessons show are run: every line of every ```bash block of README.md and stepNN/README.md."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.harness.ranks import ROOT, run_command

READMES = [ROOT / "README.md", *sorted(ROOT.glob("step*/README.md"))]
BY_HAND = ("make ", "git ", "source ", "cd ")  # `make test` runs this test; the others set up what runs it


def commands(readme: Path) -> list[str]:
    """Lines of the ```bash blocks, continued lines joined. Blocks of other kinds (console, text) are not run."""
    blocks = re.findall(r"^```bash\n(.*?)^```", readme.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith(("#", *BY_HAND))]


CASES = [(readme.relative_to(ROOT), command) for readme in READMES for command in dict.fromkeys(commands(readme))]


@pytest.mark.parametrize(("readme", "command"), CASES, ids=[f"{readme}: {command}" for readme, command in CASES])
def test_command_of_a_readme_works(readme, command):
    words = shlex.split(command)
    environment = {"PET_STANDALONE": "1"}  # torchrun takes a free port, so that runs side by side do not meet
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    python = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "torch.distributed.run"]
    assert words[0] in ("python", "torchrun", "diff"), f"{readme} shows {words[0]}, which this test cannot run"
    done = run_command([*python, *words[1:]] if words[0] != "diff" else words, timeout=180, env=environment)
    expected = (0, 1) if words[0] == "diff" else (0,)
    assert done.returncode in expected, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_the_lessons_show_commands():
    assert {str(readme) for readme, _ in CASES} >= {str(path.relative_to(ROOT)) for path in READMES[1:]}


@pytest.mark.parametrize("readme", READMES, ids=[str(path.relative_to(ROOT)) for path in READMES])
def test_links_and_pictures_exist(readme):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", readme.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (readme.parent / target).exists(), f"{readme.name} points to {target}"
