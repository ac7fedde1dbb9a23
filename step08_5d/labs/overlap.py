"""What runs while something else runs, counted in a trace of a GPU's streams (Kineto's, in Chrome's format)."""

from collections.abc import Iterator
from typing import NamedTuple

COPY = "Memcpy HtoD"  # Kineto adds where from: (Pinned -> Device) or (Pageable -> Device)
LARGE = 0.5  # of a matrix: smaller copies are none of a matrix


class Span(NamedTuple):
    """Something that ran on a stream of the GPU, in microseconds."""

    start: float
    end: float
    stream: int
    name: str


def spans(trace: dict) -> tuple[list[Span], list[Span]]:
    """The copies of matrices to the GPU, and the kernels, both in the order in which they started."""
    copies, kernels, least = [], [], LARGE * trace["lab"]["matrix"]
    for event in trace["traceEvents"]:
        if event.get("ph") != "X" or event.get("cat") not in ("kernel", "gpu_memcpy"):
            continue
        details = event.get("args", {})
        span = Span(event["ts"], event["ts"] + event["dur"], details.get("stream", 0), event["name"])
        if event["cat"] == "kernel":
            kernels.append(span)
        elif span.name.startswith(COPY) and details.get("bytes", least) >= least:
            copies.append(span)
    return sorted(copies), sorted(kernels)


def during(span: Span, others: list[Span]) -> list[Span]:
    """Those of the others that ran, for a part of their time, while this one did."""
    return [each for each in others if each.start < span.end and each.end > span.start]


def faults(trace: dict) -> Iterator[str]:
    """Sentences about what a forward does that does not hide its copies, holds too much, or takes what is not there."""
    lab = trace["lab"]
    copies, kernels = spans(trace)
    layers = lab["layers"]
    if len(copies) != layers:
        yield f"{len(copies)} copies of a matrix are in the trace, and {layers} matrices are to be borrowed, each once."
        return
    most = 2 * lab["matrix"] + 3 * lab["activation"] + lab["matrix"] // 2  # a product holds its input, itself, its ReLU
    if lab["peak"] > most:
        yield (
            f"up to {lab['peak'] / 1e6:,.0f} MB are held at once, and {most / 1e6:,.0f} are enough for two matrices. "
            "Does the host run ahead of the GPU, and ask for memory that is still in use?"
        )
    if any("Pageable" in copy.name for copy in copies):
        yield "a copy comes from memory that is not pinned, so the host waits for it: copy from `host` itself."
    alone = [number for number, copy in enumerate(copies) if number and not during(copy, kernels)]
    if alone:
        yield f"{len(alone)} of the last {layers - 1} copies ran while no kernel ran. {why_alone(copies, kernels)}"
    if len(kernels) % layers == 0:  # each layer has started equally many
        each = len(kernels) // layers
        yield from races(copies, [kernels[at : at + each] for at in range(0, len(kernels), each)])


def why_alone(copies: list[Span], kernels: list[Span]) -> str:
    """What the streams say about it."""
    if {copy.stream for copy in copies} & {kernel.stream for kernel in kernels}:
        return "They are on the stream of the products, and a stream does one thing after another."
    return (
        "They have a stream of their own, but the copy of the next matrix is started too late, or waited for at once: "
        "start it before this layer's product."
    )


def races(copies: list[Span], layers: list[list[Span]]) -> Iterator[str]:
    """A sentence if a layer began before its matrix had arrived, or if a matrix came into a buffer still in use."""
    for number, (copy, kernels) in enumerate(zip(copies, layers)):
        if kernels[0].start < copy.end:
            yield (
                f"layer {number} began before its matrix had arrived: a right number is luck then. Let the stream of "
                "the products wait for the event of the copy."
            )
            return
    for number, copy in enumerate(copies[2:], start=2):
        if copy.start < layers[number - 2][0].end:
            yield (
                f"the copy of matrix {number} began while layer {number - 2} still computed, so three matrices were "
                "there, or one was overwritten in use: let the copy wait until an older matrix has been used."
            )
            return
