"""Tables and pictures of a sweep: what was measured, what was predicted, and what failed."""

import math
from pathlib import Path

from common.drawing.figures import new_figure, write_png
from common.drawing.tables import print_table

LONGEST = 80  # characters of an error's line that a table shows; all of it is in runs.jsonl
ACROSS = ("micro_batch", "zero", "recompute", "schedule")  # what varies along a row of the heat map


def print_records(name: str, records: list[dict]) -> None:
    """The runs of a sweep: those that ended, the fastest first, and then what became of the others."""
    ended = _fastest_first(records)
    speeds = [(f"{each['tokens_per_s']:,.0f}", f"{each['step_time_s']:.3f}") for each in ended]
    rows = [(each["id"], *speed, *_losses(each)) for each, speed in zip(ended, speeds)]
    head = ("run", "tokens/s", "s", "last loss", "largest rise")
    print_table(f"{name}: {len(ended)} of {len(records)} runs ended", head, rows)
    failed = [(each["id"], each["status"], each["line"][:LONGEST]) for each in records if each["status"] != "ok"]
    if failed:
        print_table("the others", ("run", "what became of it", ""), failed)


def _losses(record: dict) -> tuple[str, str]:
    """Records of older sweeps have no losses."""
    return tuple(f"{record[name]:.2f}" if name in record else "-" for name in ("loss", "rise"))


def print_markdown(records: list[dict], predicted: dict[str, float], seen: set[str]) -> None:
    """The runs that ended, the fastest first, measured beside predicted, as a table in Markdown.

    Args:
        predicted: seconds of a step, by the id of a run.
        seen: those that were fitted to.
    """
    print("| layout | tokens/s | s, measured | s, predicted | predicted / measured |\n|---|---|---|---|---|")
    for each in _fastest_first(records):
        seconds, guess, star = each["step_time_s"], predicted[each["id"]], " *" if each["id"] in seen else ""
        cells = f"{each['tokens_per_s']:,.0f} | {seconds:.3f} | {guess:.3f} | {guess / seconds:.2f}"
        print(f"| {words(each, False)}, {words(each, True)}{star} | {cells} |")
    if seen:
        print("\n\\* the fit has seen this run")


def _fastest_first(records: list[dict]) -> list[dict]:
    return sorted((each for each in records if each["status"] == "ok"), key=lambda each: -each["tokens_per_s"])


def words(record: dict, across: bool) -> str:
    """The row of a run in a grid (its degrees), or its column (all else)."""
    chosen = {name: value for name, value in record["values"].items() if (name in ACROSS) == across}
    if not across:
        chosen = {"ranks": record["world"]} | chosen
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in chosen.items())


def draw_heat(records: list[dict], path: Path) -> Path:
    """Tokens per second by degrees (rows) and by all else (columns); a cross where a run failed. Returns the path."""
    cells = {(words(each, False), words(each, True)): each for each in records}
    rows, columns = (sorted({key[side] for key in cells}) for side in (0, 1))
    speeds = [[cells.get((row, column), {}).get("tokens_per_s", math.nan) for column in columns] for row in rows]
    figure, axis = new_figure(width=3.5 + 0.75 * len(columns), height=2.2 + 0.28 * len(rows))
    axis.grid(False)
    image = axis.imshow(speeds, aspect="auto", cmap="viridis")
    for (row, column), each in cells.items():
        text = f"{each['tokens_per_s'] / 1000:.1f}" if each["status"] == "ok" else "×"
        colour = "white" if each["status"] == "ok" else "black"
        axis.text(columns.index(column), rows.index(row), text, ha="center", va="center", fontsize=8, color=colour)
    axis.set_xticks(range(len(columns)), columns, rotation=40, ha="right", fontsize=8)
    axis.set_yticks(range(len(rows)), rows, fontsize=8)
    figure.colorbar(image, label="tokens/s")
    return write_png(figure, path)
