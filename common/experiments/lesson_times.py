"""How long each lesson takes: minutes to read it, and seconds that its commands run.

    python -m common.experiments.lesson_times         # all lessons, several minutes: it runs every command
    python -m common.experiments.lesson_times 3 4
    python -m common.experiments.lesson_times --sections 3    # by sections, for those who teach it
    python -m common.experiments.lesson_times --read          # in a second, as it runs nothing

Reading is 200 words per minute, a common estimate for texts that one studies. Code counts like prose: the lesson with
its excerpts and its answers, and the sketch. Every line of every ```bash block is run as it is written. What readers
spend on the exercises is not in it.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import common.entry  # noqa: F401
from common.drawing.tables import print_table
from common.errors import UsageError
from common.launching.command_line import OneLineParser, one_line_errors, summary

ROOT = Path(__file__).resolve().parents[2]
WORDS_PER_MINUTE = 200


def words(*texts: str) -> int:
    """Count what a reader reads: words that hold a letter or a digit."""
    return sum(len(re.findall(r"\S*[A-Za-z0-9]\S*", text)) for text in texts)


def commands(text: str) -> list[str]:
    """Return the lines of the text's ```bash blocks, continued lines joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def seconds(command: str) -> float:
    """Run a command from the top of the project, in this Python's environment, and return how long it took."""
    environment = {**os.environ, "PET_STANDALONE": "1"}  # torchrun takes a free port
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    began = time.perf_counter()
    done = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8")
    if done.returncode > command.startswith("diff"):  # which returns 1 if files differ
        raise SystemExit(f"{command}\n{done.stderr}")
    return time.perf_counter() - began


@one_line_errors
def main(argv: list[str]) -> None:
    """Print one row per lesson, or per section."""
    lessons = {int(path.parent.name[4:6]): path for path in sorted(ROOT.glob("step*/README.md"))}
    parser = OneLineParser(prog="python -m common.experiments.lesson_times", description=summary(__doc__))
    parser.add_argument("lessons", type=int, nargs="*", metavar="N", help="numbers of lessons; by default, all")
    parser.add_argument("--sections", action="store_true", help="a row for each section")
    parser.add_argument("--read", action="store_true", help="how long it takes to read them alone: run no command")
    options, rows = parser.parse_args(argv), []
    if unknown := set(options.lessons) - lessons.keys():
        raise UsageError(f"there is no lesson {min(unknown)}: they are 1 to {max(lessons)}")
    for number in options.lessons or lessons:
        folder, text = lessons[number].parent, lessons[number].read_text(encoding="utf-8")
        parts = {folder.name: [text, (folder / "sketch.py").read_text(encoding="utf-8")]}
        if options.sections:
            pieces = re.split(r"(?:^## |\A# )(.+)$", text, flags=re.MULTILINE)[1:]
            parts = {f"{folder.name[4:6]} {head}": [part] for head, part in zip(pieces[::2], pieces[1::2])}
        for name, texts in parts.items():
            read, lines = words(*texts), commands(texts[0])
            row = [name, f"{read:,}", f"{read / WORDS_PER_MINUTE:.0f} min", len(lines)]
            rows.append(row if options.read else [*row, f"{sum(map(seconds, lines)):.0f} s"])
    heads = ["lesson", "words, with code", "to read", "commands", "they run"]
    print_table("Each lesson", heads[: len(rows[0])], rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
