"""Check the labs of one submission again: `grade` starts this in a clean checkout, as a process of its own.

It imports the labs once, and forks a confined process for each. A verdict comes back through a pipe that nothing which
runs a student's file has; and each line that this process prints begins with a word that only `grade` knows.
"""

import base64
import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import common.entry  # noqa: F401
from common.errors import UsageError
from common.labs import apart, find
from common.labs.checkout import ATTEMPT, LOOK, Limit, changes
from common.labs.confined import confine
from common.labs.design import BOARD
from common.labs.find import ROOT
from common.launching.process_tree import adopt_orphans, descendants, end_descendants, marked, new_mark

PROCESSES = 64  # that a check may have at once; ours need a dozen
WRITTEN = 1 << 30  # bytes of all files of a check


def main() -> None:
    """Read a job from stdin, and print a line for each of its labs."""
    job = json.load(sys.stdin)
    apart.end_with_parent(job["parent"])
    apart.keep_to_itself()
    adopt_orphans()
    for lab in job["labs"]:
        found = check_confined(job, lab)
        end_descendants()  # a daemon of one lab does not live to see the next
        changed = changes(ROOT, job["digests"])
        print(job["word"], json.dumps({"id": lab["id"], "changed": changed} | found), flush=True)
        if changed:
            return


def check_confined(job: dict, lab: dict) -> dict:
    """Check one lab in a process of its own. Returns its score, feedback, seconds, and what was wrong with the check.

    Args:
        job: `folder`, which is empty, `seconds` and `memory` for each lab, folders that are `hidden` from it.
        lab: `id`, `student` and `files`, in base64, by path.
    """
    mark, begun = new_mark(), time.monotonic()
    reading, writing = os.pipe()
    parent, number = os.getpid(), os.fork()
    if number == 0:
        apart.end_with_parent(parent)
        os.close(reading)
        os.environ[mark[0]] = mark[1]
        _be_check(job, lab, writing)
    os.close(writing)
    text, part, limit, scratch = b"", b" ", Limit(job["seconds"]), Path(job["folder"], lab["id"])
    while part and not (over := _over(number, limit, scratch, job["seconds"])):
        if select.select([reading], [], [], LOOK)[0]:
            part = os.read(reading, 1 << 16)
            text += part
    os.close(reading)
    _end(number, mark)
    result = {"score": 0.0, "feedback": [], "fault": "", "network": ""}
    try:
        result |= json.loads(text)
    except ValueError:
        result["fault"] = over or "its check died without a word"
    return result | {"seconds": round(time.monotonic() - begun, 1)}


def _over(number: int, limit: Limit, scratch: Path, seconds: float) -> str:
    """Which limit a check with all that it has started, and written into its folder, is over; nothing if none."""
    if limit.over(number):
        return f"it was not through after {seconds:g} s"
    if len(descendants(number)) > PROCESSES:
        return f"it had more than {PROCESSES} processes at once"
    if written_in(scratch) > WRITTEN:
        return f"it wrote more than {WRITTEN >> 30} GB into files"
    return ""


def written_in(folder: Path) -> int:
    """Bytes on the disk of all files in a folder, which may change meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += 512 * os.lstat(os.path.join(place, name)).st_blocks
    return total


def _end(number: int, mark: tuple[str, str]) -> None:
    """Kill a check with all that it has started."""
    for kill, which in ((os.killpg, [number]), (os.kill, marked(mark))):
        for each in which:
            with contextlib.suppress(OSError):
                kill(each, signal.SIGKILL)
    os.waitpid(number, 0)


def _be_check(job: dict, lab: dict, writing: int) -> None:
    """Make the lab's folder, check it, write what was found, and end this process."""
    result, scratch = {}, Path(job["folder"]) / lab["id"]
    places = map(Path, job["hidden"]), [ROOT, Path(job["folder"]).parent], scratch
    try:
        os.setsid()
        (scratch / "tmp").mkdir(parents=True)
        os.environ["TMPDIR"] = os.environ["HOME"] = tempfile.tempdir = str(scratch / "tmp")
        _silence(scratch / "printed")
        network = confine(scratch, job["seconds"], job["memory"])
        result["network"] = f"{network} {apart.OWN if apart.begin(*places) else apart.SHARED}"
        folder = scratch / lab["id"]
        folder.mkdir()
        result["fault"] = attempt(folder / "said") if lab["id"] == ATTEMPT else ""
        if lab["id"] != ATTEMPT:
            result |= _check(lab, folder, scratch)
    except UsageError as error:
        result |= {"feedback": [str(error)], "unjudged": True}
    except BaseException as error:
        result["fault"] = f"its check failed: {type(error).__name__}: {str(error)[:300]}"
    try:
        content = json.dumps(result).encode()
        while content:
            content = content[os.write(writing, content) :]
    finally:
        os._exit(0)


def _check(lab: dict, folder: Path, scratch: Path) -> dict:
    found = find.lab(lab["id"])
    found.start(folder, lab["student"])
    for name, content in lab["files"].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(base64.b64decode(content))
    verdict = found.check(folder, lab["student"])
    kept = {"score": verdict.score, "feedback": to_keep(verdict.feedback, scratch)}
    return kept | {"unsure": verdict.unsure, "unjudged": verdict.unjudged}


def attempt(said: Path) -> str:
    """What keeps Python from running where a submission does, into the file `said`; nothing if it runs."""

    def work() -> None:
        apart.give_up_rights()
        try:
            command = [sys.executable, "-c", "import torch, common.labs.find"]
            done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
            why = done.stderr.strip().splitlines()[-1:] if done.returncode else ["it runs"]
            said.write_text(why[0] if why else f"it ends with status {done.returncode}", encoding="utf-8")
        except OSError as error:
            said.write_text(str(error), encoding="utf-8")

    apart.apart(work)
    found = said.read_text(encoding="utf-8") if said.exists() else "it ends without a word"
    return "" if found == "it runs" else found[:300]


def to_keep(feedback: Iterable[str], scratch: Path) -> list[str]:
    """Without what is gone when somebody reads it: lines that name a file, and a score board of one student."""
    lines = itertools.takewhile(lambda line: line != BOARD, feedback)
    return [line for line in lines if str(scratch) not in line]


def _silence(path: Path) -> None:
    """Let this process, and what it starts, read nothing, and print into a file that no one reads."""
    output, nothing = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), os.open(os.devnull, os.O_RDONLY)
    for number, new in ((0, nothing), (1, output), (2, output)):
        os.dup2(new, number)


if __name__ == "__main__":
    main()
