"""The tables of the benchmarks' results, as tests/README.md and the steps' measurements.md show them.

A table is found by its first line, and reaches to the line that says when it was measured. `python -m tests.benchmarks
--write` replaces everything between them, and a test compares the pages with the results.
"""

from collections.abc import Callable
from typing import NamedTuple

from tests.benchmarks.kept import load

DEGREES = 2, 4  # ranks
SCHEDULES = {"afab": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
SCHEDULES |= {"zbv": "ScheduleZBVZeroBubble"}
EXPERTS = 4, 8, 16, 32, 64


class Table(NamedTuple):
    """The `header` on a `page`, and the cells of the other rows, which are made from the results of `benchmarks`."""

    page: str
    header: str
    benchmarks: tuple[str, ...]
    rows: Callable[..., list[tuple]]


# ---- cells -----------------------------------------------------------------------------------------------------------


def speed(row: dict) -> str:
    return f"{row['median']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def milliseconds(row: dict) -> str:
    return f"{row['ours_s'] * 1e3:,.0f} / {row['peer_s'] * 1e3:,.0f} ms"


def memory(row: dict) -> str:
    return f"{row['memory_ratio']:.2f}" if "memory_ratio" in row else "not measured"


def peaks(row: dict) -> str:
    return f"{row['ours_peak_bytes'] / 1e6:.0f} / {row['peer_peak_bytes'] / 1e6:.0f} MB"


def listed(cell: Callable, *rows: dict) -> str:
    return ", ".join(cell(row) for row in rows)


def median(row: dict) -> str:
    return f"{row['median']:.2f}"


def of_both(results: dict, *names: str) -> tuple[str, ...]:
    """Throughput, then memory, on 2 and on 4 ranks, of the rows whose names begin so."""
    rows = [[results[f"{name}_{ranks}_ranks"] for name in names] for ranks in DEGREES]
    return tuple(listed(cell, *each) for cell in (median, memory) for each in rows)


def from_to(cell: Callable, rows: list[dict]) -> str:
    return f"{min(map(cell, rows))} to {max(map(cell, rows))}"


# ---- tables ----------------------------------------------------------------------------------------------------------


def all_steps(data: dict, zero: dict, tensor: dict, pipeline: dict, context: dict) -> list[tuple]:
    return [
        ("2", "`DistributedDataParallel`", *of_both(data, "ddp")),
        ("3, stage 1", "DDP with `ZeroRedundancyOptimizer`", *of_both(zero, "stage1")),
        ("3, stages 2 and 3", "FSDP2, `fully_shard`", *of_both(zero, "stage2", "stage3")),
        ("4", "DTensor, `parallelize_module`", *of_both(tensor, "overlap")),
        ("5", "`torch.distributed.pipelining`: GPipe, 1F1B, interleaved, ZBV", *of_both(pipeline, *SCHEDULES)),
        ("6", "the attention of `context_parallel`: ring, all-gather", *of_both(context, "ring", "allgather")),
    ]


def experts_in_short(results: dict) -> list[tuple]:
    rows = [results[f"grouped_mm_{count}_experts"] for count in EXPERTS]
    return [("7", "transformers' `grouped_mm`, 4 to 64 experts", from_to(median, rows), from_to(memory, rows))]


def of_data_parallel(results: dict) -> list[tuple]:
    rows = [(ranks, results[f"ddp_{ranks}_ranks"]) for ranks in DEGREES]
    return [(ranks, speed(row), milliseconds(row), memory(row)) for ranks, row in rows]


def of_zero(results: dict) -> list[tuple]:
    rows = [(ranks, stage, results[f"stage{stage}_{ranks}_ranks"]) for ranks in DEGREES for stage in (1, 2, 3)]
    return [(ranks, stage, speed(row), milliseconds(row), memory(row), peaks(row)) for ranks, stage, row in rows]


def of_tensor_parallel(results: dict) -> list[tuple]:
    modes = "plain", "overlap", "chunked"
    rows = [(ranks, mode, results[f"{mode}_{ranks}_ranks"]) for ranks in DEGREES for mode in modes]
    if "overlap_against_plain" in results:
        rows.append((2, "overlap / plain, a model of 1 M", results["overlap_against_plain"]))
    return [(ranks, mode, speed(row), milliseconds(row), memory(row), peaks(row)) for ranks, mode, row in rows]


def of_pipeline(results: dict) -> list[tuple]:
    rows = [(ranks, name, results[f"{name}_{ranks}_ranks"]) for ranks in DEGREES for name in SCHEDULES]
    found = []
    for ranks, name, row in rows:
        assert row["in_flight"] == row["peer_in_flight"], name
        in_flight = ", ".join(map(str, row["in_flight"]))
        found.append((ranks, f"{name} / `{SCHEDULES[name]}`", speed(row), milliseconds(row), memory(row), in_flight))
    for ranks in DEGREES:
        row, title = results[f"1f1b_without_hooks_{ranks}_ranks"], f"1f1b without hooks / `{SCHEDULES['1f1b']}`"
        found.append((ranks, title, speed(row), milliseconds(row), memory(row), "the same"))
    return found


def of_context_parallel(results: dict) -> list[tuple]:
    names = {"ring": "ring", "allgather": "all-gather", "zigzag": "a step: zigzag / contiguous"}
    rows = [(ranks, title, results[f"{name}_{ranks}_ranks"]) for ranks in DEGREES for name, title in names.items()]
    return [(ranks, title, speed(row), milliseconds(row), memory(row)) for ranks, title, row in rows]


def of_expert_parallel(results: dict) -> list[tuple]:
    found = []
    for count in EXPERTS:
        grouped, eager, loop = (results[f"{peer}_{count}_experts"] for peer in ("grouped_mm", "eager", "loop"))
        found.append((count, speed(grouped), memory(grouped), speed(eager), memory(eager), speed(loop)))
    return found


ALL = "data_parallel", "zero", "tensor_parallel", "pipeline", "context_parallel"


def header(*first: str, peer: str, last: str = "") -> str:
    return f"| {' | '.join(first)} | throughput, ours / {peer} | a step | memory, ours / {peer} |{last}"


TABLES = [
    Table(
        "tests/README.md",
        "| step | against | throughput, 2 ranks | 4 ranks | memory, 2 ranks | 4 ranks |",
        ALL,
        all_steps,
    ),
    Table("tests/README.md", "| step | against | throughput | memory |", ("expert_parallel",), experts_in_short),
    Table(
        "step02_data_parallel/measurements.md",
        header("ranks", peer="DDP's"),
        ("data_parallel",),
        of_data_parallel,
    ),
    Table(
        "step03_zero/measurements.md",
        header("ranks", "stage", peer="PyTorch's", last=" peak |"),
        ("zero",),
        of_zero,
    ),
    Table(
        "step04_tensor_parallel/measurements.md",
        header("ranks", "`--tp-mode`", peer="DTensor's", last=" peak |"),
        ("tensor_parallel",),
        of_tensor_parallel,
    ),
    Table(
        "step05_pipeline/measurements.md",
        header("ranks", "schedule", peer="PyTorch's", last=" in flight, both |"),
        ("pipeline",),
        of_pipeline,
    ),
    Table(
        "step06_context_parallel/measurements.md",
        header("ranks", "attention", peer="PyTorch's"),
        ("context_parallel",),
        of_context_parallel,
    ),
    Table(
        "step07_expert_parallel/measurements.md",
        "| experts | against `grouped_mm` | memory | against `eager` | memory | against our loop |",
        ("expert_parallel",),
        of_expert_parallel,
    ),
]
PAGES = list(dict.fromkeys(table.page for table in TABLES))


def lines_of(table: Table) -> list[str]:
    """The table, with the line that follows it: when, on what, and in how many pairs its figures were measured."""
    results = [load(name) for name in table.benchmarks]
    lines = [table.header, "|---" * (table.header.count("|") - 1) + "|"]
    lines += [f"| {' | '.join(map(str, cells))} |" for cells in table.rows(*results)]
    dates, torches, cores = ({each["hardware"][key] for each in results} for key in ("date", "torch", "cores"))
    versions = ", ".join(sorted(each.split("+")[0] for each in torches))
    when = " to ".join(dict.fromkeys((min(dates), max(dates))))
    rows = [row for each in results for row in each.values() if isinstance(row, dict) and "median" in row]
    counts = sorted({row["pairs"] for row in rows})
    pairs = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return [*lines, "", f"*Measured {when}, PyTorch {versions}, {max(cores)} cores, {pairs} pairs.*"]


def with_tables(page: str, text: str) -> str:
    """The page's text with its tables as the results have them. Raises ValueError if it lacks one."""
    lines = text.split("\n")
    for table in TABLES:
        if table.page == page:
            start = lines.index(table.header)
            end = next(i for i, line in enumerate(lines) if i > start and line.startswith("*Measured "))
            lines[start : end + 1] = lines_of(table)
    return "\n".join(lines)
