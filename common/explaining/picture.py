"""The picture of a diagnosis: both curves, and below them their difference in the band of what rounding does."""

from pathlib import Path

from common.drawing.figures import SERIES, new_figure, write_png
from common.drawing.lanes import open_axis
from common.explaining.band import INSIDE, OUTSIDE
from common.explaining.verdict import Explanation

SURE, UNSURE = "#D9D9D9", "#EFEFEF"
LEAST = 1e-17  # where equal numbers are drawn on the logarithmic axis


def draw(explanation: Explanation, names: tuple[str, str], path: Path | str) -> Path:
    """Draw the columns that were compared, a pair of panels each, into the PNG `path`."""
    columns = explanation.differences
    figure, axes = new_figure(2, len(columns), 5 * len(columns), 5.6, squeeze=False, sharex=True)
    for (above, below), column in zip(axes.T, columns, strict=True):
        for values, name, colour, width in (column.a, names[0], "#CFCFCF", 6), (column.b, names[1], SERIES[0], 1.8):
            above.plot(column.steps, values, color=colour, linewidth=width, label=name)
        title = column.key.replace("grad_norm", "gradient norm")
        above.set_title(title, loc="left")
        above.legend(frameon=False, fontsize="small")
        inside, outside = ([times * limit for limit in column.limits] for times in (INSIDE, OUTSIDE))
        bottom = min(LEAST, *column.limits)
        below.fill_between(column.steps, bottom, inside, color=SURE, label=f"rounding in {explanation.dtype}")
        below.fill_between(column.steps, inside, outside, color=UNSURE, label="cannot tell")
        drawn = [min(max(abs(each), LEAST), 10.0) for each in column.relative]
        look = {"color": SERIES[5], "marker": "o", "markersize": 3.5, "linewidth": 1}
        below.plot(column.steps, drawn, **look, label="difference")
        seen = [each for each in drawn if each > LEAST] + [inside[0]]
        below.set(yscale="log", ylim=(min(seen) / 10, max(*drawn, *outside) * 10), xlabel="step")
        below.set_title(f"relative difference of the {title}", loc="left")
        below.legend(frameon=False, fontsize="small", loc="upper left", ncols=3)
    figure.suptitle(f"verdict: {explanation.verdict}", x=0.01, ha="left")
    for axis in axes.flat:
        axis.locator_params(axis="x", integer=True)
        open_axis(axis)
    return write_png(figure, path)
