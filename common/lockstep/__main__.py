"""`python -m common.lockstep`: one process and several ranks take the same step; which tensor is the first to differ?

    python -m common.lockstep --reference "step01_single_gpu/train.py --layers 2 --seq-len 64" \\
        --candidate "torchrun --nproc_per_node 4 step04_tensor_parallel/train.py --layers 2 --seq-len 64 --tp 2"

Both run in float64, so that rounding is far below any mistake. Weights as they are used, activations, their gradients
and the gradients of weights are compared by name, each rank's with its place in the whole.
"""

import os
import pickle
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common.config import flag_names, spelled
from common.errors import UsageError
from common.launching.command_line import STEP_NAMES, OneLineParser, one_line_errors, parse, summary
from common.lockstep.explain import explain
from common.lockstep.notes import Seen


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    """Compare two commands. Returns 0 if no tensor differs, and 1 if one does."""
    parser = OneLineParser(prog="python -m common.lockstep", description=summary(__doc__))
    parser.add_argument("--reference", required=True, metavar="COMMAND", help="step0N_name/train.py FLAGS: one process")
    parser.add_argument("--candidate", required=True, metavar="COMMAND", help="what to look into, with its torchrun")
    parser.add_argument("--steps", type=int, default=2, help="how many (default: 2, so that an update is seen, too)")
    options = parser.parse_args(argv)
    commands = {"reference": options.reference, "candidate": options.candidate}
    divided = {kind: divide(kind, command) for kind, command in commands.items()}
    if options.steps < 1:
        raise UsageError(f"--steps {options.steps} must be at least 1")
    check_same(*(words for _, words in divided.values()))
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        (whole,), ranks = (observe(kind, *divided[kind], folder, options.steps) for kind in divided)
    verdict = explain(whole, ranks)
    print(verdict.text)
    return int(not verdict.equal)


def divide(kind: str, command: str) -> tuple[list[str], list[str]]:
    """Return what starts the ranks, and the script with its flags. Raises UsageError for another script, or starter."""
    try:
        words = shlex.split(command)
    except ValueError as error:  # a quotation mark without the other one
        raise UsageError(f"--{kind} {command!r}: {error}") from None
    at = next((i for i, word in enumerate(words) if Path(word).name == "train.py"), None)
    if at is None or Path(words[at]).resolve().parent.name not in STEP_NAMES:
        raise UsageError(f"--{kind}: there is no step0N_name/train.py in {command!r}; see common/your_own_model.md")
    launcher, script = words[:at], words[at:]
    if launcher[:1] == ["torchrun"]:
        options = [word for word in launcher[1:] if word != "--standalone"]
        meets_others = any("rdzv" in word or "master" in word or "nnodes" in word for word in options)
        alone = [] if meets_others else ["--standalone"]  # a port that nobody else uses
        launcher = [sys.executable, "-m", "torch.distributed.run", *alone, *options]
    elif launcher[:1] in ([], ["python"], ["python3"]):
        launcher = [sys.executable, *launcher[1:]]
    if not shutil.which(launcher[0]):
        raise UsageError(f"--{kind}: there is no program {launcher[0]!r}")
    return launcher, script


def check_same(reference: list[str], candidate: list[str]) -> None:
    """Raises UsageError if the two, scripts and their flags, describe two trainings, and not two layouts of one."""
    steps = [STEP_NAMES.index(Path(words[0]).resolve().parent.name) + 1 for words in (reference, candidate)]
    configs = [parse(step, words[1:]) for step, words in zip(steps, (reference, candidate))]
    for name in flag_names("model", "data", "update"):
        ours, theirs = (getattr(config, name) for config in configs)
        if ours != theirs and name != "dtype":
            raise UsageError(
                f"{spelled(name)} is {ours} in the reference and {theirs} in the candidate: no common step"
            )


def observe(kind: str, launcher: list[str], script: list[str], folder: str, steps: int) -> list[Seen]:
    """Run a command with `rank.py` in the place of its script. Returns what its ranks have seen.

    The script may belong to another copy of the project, which then is what runs. Raises UsageError if it fails, after
    it has said why.
    """
    root = Path(script[0]).resolve().parents[1]
    command = [*launcher, str(root / "common" / "lockstep" / "rank.py"), folder, kind, str(steps), *script]
    variables = {"OMP_NUM_THREADS": "1"} | os.environ  # or torchrun prints four lines about it
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    status = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, check=False).returncode
    found = [pickle.loads(path.read_bytes()) for path in Path(folder).glob(f"*.{kind}")]
    if status:
        raise UsageError(f"the {kind} ended with status {status}")
    if kind == "reference" and len(found) != 1:
        raise UsageError(f"the reference is one process, and these are {len(found)}")
    return sorted(found, key=lambda seen: seen.rank)


if __name__ == "__main__":
    raise SystemExit(main())
