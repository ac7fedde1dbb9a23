"""Tables of experiments and reports, as aligned text."""

from collections.abc import Iterable


def print_table(title: str, header: Iterable[str], rows: Iterable[Iterable]) -> None:
    """Print a title and rows under a header; every column is as wide as its widest cell."""
    rows = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    print(f"\n{title}")
    for index, (first, *cells) in enumerate(rows):
        print("  " + "  ".join([first.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]))
        if index == 0:
            print("  " + "  ".join("-" * width for width in widths))


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
