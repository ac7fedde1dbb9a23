"""Tables of experiments and reports, as aligned text."""

from collections.abc import Iterable


def aligned(rows: list[list[str]]) -> list[str]:
    """A line for each row; every column is as wide as its widest cell."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    return ["  ".join([first.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for first, *cells in rows]


def print_table(title: str, header: Iterable[str], rows: Iterable[Iterable]) -> None:
    """Print a title and aligned rows under a header."""
    rows = [[str(cell) for cell in row] for row in (header, *rows)]
    dashes = ["-" * max(len(cell) for cell in column) for column in zip(*rows)]
    print(f"\n{title}", *aligned([rows[0], dashes, *rows[1:]]), sep="\n  ")


def compared(predicted: float, measured: float, digits: str = ",.0f", scale: float = 1) -> tuple[str, str, str]:
    """Return the cells predicted, measured and ratio (measured / predicted), the first two divided by `scale`."""
    ratio = f"{measured / predicted:.4f}" if abs(predicted) > 1e-9 else "-"  # what is 0 but for rounding has no ratio
    return format(predicted / scale, digits), format(measured / scale, digits), ratio


def print_comparison(
    title: str, unit: str, rows: Iterable[tuple[str, float, float]], digits: str = ",.0f", scale: float = 1
) -> None:
    """Print rows (name, predicted, measured) with their ratio. `unit` heads the names."""
    cells = [(name, *compared(predicted, measured, digits, scale)) for name, predicted, measured in rows]
    print_table(title, (unit, "predicted", "measured", "ratio"), cells)
