"""The formats as a table and a picture."""

import math

from common.drawing.figures import SERIES, new_figure, save_figure
from common.drawing.tables import print_table
from step08_5d.narrow_numbers.experiments.formats import FORMATS, numbers


def formats(quick: bool) -> None:
    """Range and resolution of float32 down to e2m1, and of the scales E8M0."""
    rows = []
    for name, each in FORMATS.items():
        found = (each.smallest, each.smallest_normal, each.largest)
        bits = 1 + each.exponent + each.mantissa
        rows.append((name, bits, *(f"{number:.3g}" for number in found), f"{each.between_one_and_two:,}"))
    rows.append(("E8M0", 8, f"{2.0**-127:.3g}", f"{2.0**-127:.3g}", f"{2.0**127:.3g}", 0))
    header = ("", "bits", "smallest", "smallest normal", "largest", "between 1 and 2")
    print_table("What the bits buy", header, rows)
    figure, (reach, line) = new_figure(1, 2, width=10, height=3.2, width_ratios=(1, 1.2))
    for index, each in enumerate(FORMATS.values()):
        low, normal, high = (math.log2(number) for number in (each.smallest, each.smallest_normal, each.largest))
        reach.barh(index, normal - low, left=low, color=SERIES[index], alpha=0.35)
        reach.barh(index, high - normal, left=normal, color=SERIES[index])
    reach.barh(len(FORMATS), 254, left=-127, color=SERIES[len(FORMATS)])
    reach.set_yticks(range(len(FORMATS) + 1), [*FORMATS, "E8M0 (scales)"])
    reach.invert_yaxis()
    reach.set(xlabel="power of two", title="range (pale: numbers without a leading 1)")
    for index, name in enumerate(("e5m2", "e4m3", "e2m1")):
        there = [number for number in numbers(FORMATS[name]).tolist() if number <= 8]
        line.vlines(there, index - 0.35, index + 0.35, color=SERIES[list(FORMATS).index(name)], linewidth=1.2)
    line.set_yticks(range(3), ("e5m2", "e4m3", "e2m1"))
    line.invert_yaxis()
    line.set(xlabel="number", title="every number from 0 to 8 (e2m1 ends at 6)")
    for axis in (reach, line):
        axis.grid(visible=False, axis="y")
        axis.title.set_fontsize(10)
    save_figure(figure, "formats")
