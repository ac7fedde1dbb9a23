"""The room's score board of the design labs: a folder that everybody writes to, drawn by one command.

Each student writes a file of their own there, so that no lock is needed, which shared folders often lack. A row is
that of a name: those who work together as number 0 are still several people.
"""

import hashlib
import json
import re
import sys
from pathlib import Path

from common.drawing.figures import SERIES, new_figure, write_png
from common.errors import UsageError
from common.labs import find
from common.labs.answers import kept
from common.labs.design import Design, is_score
from common.labs.state import State
from common.labs.submit import printable
from common.labs.whole_files import replace

ROWS = 10  # of a board


def publish(state: State) -> None:
    """Copy this student's designs into the room's folder. What goes wrong there is a line, and the check counts."""
    rows = [row for row in kept(state.home / "scores.jsonl") if is_score(row)]
    if not rows:
        return  # no design has run yet
    if not state.name:
        print(f"warning: on the board as student {state.student}; --name gives you a row of your own", file=sys.stderr)
    text = "".join(json.dumps(row | {"name": state.name}) + "\n" for row in rows)
    path = Path(state.board) / f"scores-{state.student}{'-' * bool(state.name)}{_in_a_path(state.name)}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, lambda part: part.write_text(text, encoding="utf-8"))
    except OSError as error:
        print(f"warning: not on the room's score board: {state.board}: {error.strerror}", file=sys.stderr)


def _in_a_path(name: str) -> str:
    """A name as a part of a file's: the same for the same person, another for others, harmless for any system."""
    short = re.sub(r"[^a-z0-9]+", "_", name.casefold())[:20]
    return short + f"-{hashlib.sha256(name.casefold().encode()).hexdigest()[:8]}" * bool(name)


def best_rows(folder: Path) -> dict[tuple[str, int], list[dict]]:
    """By lab and variant of its hardware: the best design of each person, fastest first."""
    best = {}
    for path in sorted(folder.glob("scores*.jsonl")):
        rows = [row for row in kept(path) if is_score(row | {"speed": 1.0}) and row["lab"] in find.all_labs()]
        good = [row for row in rows if is_score(row) and _is_possible(row)]
        if odd := [row for row in rows if row not in good]:
            speed = str(odd[0].get("speed"))[:20]
            why = "no layout that we know is as fast on such hardware"
            print(f"warning: {path.name}: {speed} tokens/s is left out: {why}", file=sys.stderr)
        for row in good:
            key = row["lab"], row["variant"], _person(row)
            if key not in best or row["speed"] > best[key]["speed"]:
                best[key] = row
    found = {}
    for (lab, variant, _), row in sorted(best.items(), key=lambda item: (item[0][:2], -item[1]["speed"])):
        found.setdefault((lab, variant), []).append(row)
    return found


def _is_possible(row: dict) -> bool:
    lab = find.all_labs()[row["lab"]]
    return isinstance(lab, Design) and lab.is_possible(row)


def _person(row: dict) -> str | int:
    """Who a row is of: a name, because a room may work together as one number; without one, the number."""
    name = row.get("name")
    return name.casefold() if name and isinstance(name, str) else row["student"]


def who(row: dict) -> str:
    return printable(row["name"]) if isinstance(_person(row), str) else f"student {row['student']}"


def draw_board(folder: Path) -> int:
    """Print the boards of a folder, and draw them there as board.png."""
    boards = best_rows(folder)
    if not boards:
        raise UsageError(f"{folder} has no scores yet: `--board {folder}` lets checks of design labs write into it")
    figure, axes = new_figure(rows=len(boards), width=9, height=0.8 + 1.9 * len(boards), squeeze=False)
    for ((lab, variant), rows), axis in zip(boards.items(), axes[:, 0]):
        title = f"{lab}, hardware {variant}"
        print(title)
        for place, row in enumerate(rows[:ROWS], 1):
            print(f"{place:3}. {row['speed']:>12,.0f} tokens/s  {who(row)}: {printable(row['layout'])}")
        shown = rows[:ROWS][::-1]  # the fastest at the top
        names = [f"{place}. {who(row)}" for place, row in enumerate(rows[:ROWS], 1)][::-1]
        axis.barh(range(len(shown)), [row["speed"] for row in shown], color=SERIES[0], alpha=0.5)
        axis.set_yticks(range(len(shown)), names, parse_math=False)  # a name may have a dollar
        for at, row in enumerate(shown):
            layout = printable(row["layout"])[:60]
            axis.annotate(f" {layout}", (0, at), va="center", fontsize=8, parse_math=False)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("tokens/s, predicted")
    print(f"drawn: {write_png(figure, folder / 'board.png')}")
    return 0
