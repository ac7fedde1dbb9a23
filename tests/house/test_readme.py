"""The commands that README.md and the lessons show are run: every line of every ```bash block.

The commands of a page run one after another on forked processes, which saves the start of Python and of torchrun, with
a narrower model, shorter sequences and for fewer steps. With TEST_ALL=1 they run as they are written.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.harness.ranks import ROOT, run_command, run_script

READMES = [ROOT / "README.md", *sorted(ROOT.glob("step*/README.md")), *sorted(ROOT.glob("step*/*/README.md"))]
LINKING = [*READMES, *sorted(ROOT.glob("common/**/*.md")), ROOT / "tests" / "README.md"]  # pages that point to others
BY_HAND = ("make ", "git ", "source ", "cd ")  # `make test` runs this test; the others set up what runs it


def commands(readme: Path) -> list[str]:
    """Lines of the ```bash blocks, continued lines joined. Blocks of other kinds (console, text) are not run."""
    blocks = re.findall(r"^```bash\n(.*?)^```", readme.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return list(dict.fromkeys(line for line in lines if line and not line.startswith(("#", *BY_HAND))))


@pytest.mark.parametrize("readme", READMES, ids=[path.parent.name for path in READMES])
def test_commands_work(readme, tmp_path):
    assert (listed := commands(readme)), "it shows no command"
    for command in listed:
        if not os.environ.get("TEST_ALL"):
            later = any(flag in command for flag in ("--trace", "--save-every", "--resume"))
            steps = "6" if later else "2"  # shows as much to a test
            command = re.sub(r"--steps (10|[35]$)", f"--steps {steps}", command)
            command = command.replace("runs/", f"{tmp_path}/")  # runs/ is the reader's
            command = command.replace("--nproc_per_node 16 step08_5d/train.py", "--nproc_per_node 8 step08_5d/train.py")
            command = command.replace("--only attention norms", "--only loss")  # test_compiled.py compiles both
            rungs = "elu divergence fusion attention roofline four_bits"  # of twelve; test_gpu_ladder.py has the others
            command = command.replace("gpu_ladder --quick", f"gpu_ladder --quick --only {rungs}")
            if command.endswith("planning published") or "dry-run --world 16384" in command:
                continue  # test_published.py (with TEST_ALL) and test_dry_run.py have them, and what has to come out
            if "train.py" in command and not command.startswith("diff"):
                command = re.sub(r" --seq-len \d+", "", command) + " --seq-len 64 --hidden 64 --ffn 96"
        words = shlex.split(command)
        environment = {"PET_STANDALONE": "1"}  # torchrun takes a free port
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        if words[0] == "diff":
            done = run_command(words)
        elif os.environ.get("TEST_ALL") or "kernels.compiled" in command:  # forked processes have Triton's interpreter
            python = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
            done = run_command([*python[words[0]], *words[1:]], timeout=240, env=environment)
        elif words[0] == "torchrun":
            assert words[1] == "--nproc_per_node"
            done = run_script(*words[3:], ranks=int(words[2]), timeout=240)
        else:
            assert words[0] == "python", f"{words[0]} cannot be run here"
            draws = {"module": "matplotlib.figure"} if words[1] == "-m" else {}  # loaded once, not by each command
            done = run_script(*words[1:], timeout=240, **draws)
        assert done.returncode <= (words[0] == "diff"), f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("readme", LINKING, ids=[str(path.relative_to(ROOT)) for path in LINKING])
def test_links_and_pictures_exist(readme):
    for target, _, heading in re.findall(r"\]\(([^)#\s]*)(#([^)\s]*))?[^)]*\)", readme.read_text()):
        if not target.startswith(("http://", "https://")):
            page = readme.parent / target if target else readme
            assert page.exists(), f"{readme.name} points to {target}"
            assert not heading or heading in headings(page), f"{readme.name} points to {target}#{heading}"


def headings(page: Path) -> set[str]:
    """The names by which others point to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in found}
