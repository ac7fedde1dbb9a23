"""What only a cluster can show: a step of Llama 3 405B on 16,384 GPUs, predicted and published."""

from typing import NamedTuple

from common.costs.hardware import H100_TFLOPS
from common.costs.networks import NETWORK, NVLINK
from common.costs.vocabulary import seconds
from common.drawing.tables import print_table
from common.link import Link
from common.presets import PRESETS
from common.process_groups import DIMENSION_OF
from step08_5d import cost
from step08_5d.cost import Layout

LLAMA = PRESETS["llama3-405b"]
ALPHA = 10e-6  # seconds a message
LINKS = {"tp": Link(ALPHA, NVLINK)} | {name: Link(ALPHA, NETWORK) for name in ("cp", "pp", "dp")}


class Published(NamedTuple):
    """A configuration of Llama 3 405B with its speed: arXiv:2407.21783, table 4. ZeRO-1 and 8 stages are ours."""

    layout: Layout
    tflops: float  # per GPU
    mfu: float

    @property
    def name(self) -> str:
        layout = self.layout
        return f"{layout.dp * layout.pp * layout.cp * layout.tp:,} GPUs, cp {layout.cp}"


SAME = {"tp": 8, "pp": 16, "zero": 1, "dtype": "bfloat16", "stages": 8, "cp_mode": "allgather"}
RUNS = (
    Published(Layout(8192, dp=64, micro_batches=32, **SAME), 430, 0.43),
    Published(Layout(8192, dp=128, micro_batches=16, **SAME), 400, 0.41),
    Published(Layout(131072, dp=8, cp=16, micro_batches=16, **SAME), 380, 0.38),
)


def traffic(layout: Layout) -> dict[str, tuple[float, float, str]]:
    """By dimension what a rank of a middle stage sends in a step: bytes, seconds on the wire, what may hide them."""
    ranks = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.copies}
    result = {}
    for message in cost.messages(LLAMA, layout, ends=False):
        name = DIMENSION_OF[message.group]
        size, time, hidden_by = result.get(name, (0.0, 0.0, message.hidden_by))
        time += seconds(message, ranks[name], LINKS[name])
        result[name] = size + message.count * message.bytes, time, hidden_by
    return result


def llama(quick: bool) -> None:
    """PREDICTED and PUBLISHED: a step of Llama 3 405B on 8,192 and 16,384 GPUs, dimension by dimension."""
    rows, bounds = [], []
    for run in RUNS:
        layout, sent = run.layout, traffic(run.layout)
        compute = sum(cost.operations(LLAMA, layout).values()) / (H100_TFLOPS * 1e12)
        idle = {stages: layout._replace(stages=stages) for stages in (1, layout.stages)}
        idle = {stages: compute * cost.bubble(each) / (1 - cost.bubble(each)) for stages, each in idle.items()}
        best = compute + idle[layout.stages]
        worst = best + sum(time for _, time, _ in sent.values())
        cells = (f"{compute:.2f}", *(f"{each:.2f}" for each in idle.values()))
        bounds.append((run.name, *cells, f"{compute / best:.0%}", f"{compute / worst:.0%}", f"{run.mfu:.0%}"))
        rows += [
            (f"{run.name}: {name}", f"{size / 1e9:,.1f}", f"{time:.2f}", hidden_by)
            for name, (size, time, hidden_by) in sent.items()
        ]
    print(f"\npeak {H100_TFLOPS:g} TFLOP/s, NVLink 450 GB/s, network 50 GB/s out of each GPU; tp 8, pp 16, ZeRO-1")
    print_table("predicted: what a GPU sends in a step", ("", "GB", "s on the wire", "may hide behind"), rows)
    header = ("", "computes, s", "bubble, 1 stage on a rank", "8 stages")
    header += ("of the peak if all hides but the bubble", "if nothing hides", "MFU, published")
    print_table("predicted: a step, beside the published speed", header, bounds)
