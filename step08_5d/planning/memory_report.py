"""One layout's memory as a table: for our model by stage of the pipeline, or in the playbook's GPT form."""

from common.drawing.tables import print_table
from common.errors import UsageError
from common.model_config import ModelConfig
from common.presets import resolve
from step08_5d.cost import Layout
from step08_5d.planning import gpt_memory
from step08_5d.planning.memory import of_stage
from step08_5d.planning.search import check_degrees, named

DEGREES = ("dp", "tp", "pp", "cp", "ep", "zero", "micro_batch")


def show(options) -> None:
    """The table for the options of the command line."""
    model = resolve(options.model)
    layout = Layout(options.seq_len, **{name: getattr(options, name) for name in DEGREES}, dtype="bfloat16")
    check_degrees(model, layout, options.sequences)
    micro_batches = max(1, options.sequences // (layout.dp * layout.micro_batch))
    layout = layout._replace(micro_batches=micro_batches, recompute=options.recompute)
    if options.form == "gpt":
        _show_gpt(options.model, model, layout)
    else:
        _show_ours(options.model, model, layout)


def _show_ours(name: str, model: ModelConfig, layout: Layout) -> None:
    stages = sorted({0, 1, layout.pp // 2, layout.pp - 1} & set(range(layout.pp)))
    held = [of_stage(model, layout, stage) for stage in stages]
    rows = []
    for stage, kinds in zip(stages, held):
        in_flight = min(layout.pp - stage, layout.micro_batches)
        rows.append((f"{stage}", in_flight, *(f"{size / 1e9:.2f}" for size in kinds.values()), f"{_all(kinds):.2f}"))
    header = ("stage", "in flight", *held[0], "all")
    print_table(f"predicted: {name}, {named(layout)}, GB of each rank of a stage, under 1F1B", header, rows)
    fullest = max(range(len(held)), key=lambda index: _all(held[index]))
    most = max(held[fullest], key=held[fullest].get)
    print(f"  the fullest is stage {stages[fullest]}: {_all(held[fullest]):.1f} GB, most of it {most}")


def _all(kinds: dict[str, float]) -> float:
    return sum(kinds.values()) / 1e9


def _show_gpt(name: str, model: ModelConfig, layout: Layout) -> None:
    if model.experts:
        raise UsageError(f"--form gpt has no experts, and {name} has {model.experts}")
    shape, kind = gpt_memory.of_model(model)
    columns = [gpt_memory.widget(shape, layout, kind)]
    columns += [gpt_memory.right(shape, layout, kind, stage) for stage in sorted({0, layout.pp - 1})]
    rows = [(kind, *(f"{each[kind] / 2**30:.2f}" for each in columns)) for kind in gpt_memory.KINDS]
    rows.append(("all", *(f"{sum(each.values()) / 2**30:.2f}" for each in columns)))
    header = ("", "widget", *(f"right, stage {stage}" for stage in sorted({0, layout.pp - 1})))
    print_table(f"predicted: {name} as the playbook's GPT, {named(layout)}, GiB of a rank, 1F1B", header, rows)
    if layout.pp * layout.cp > 1:
        print("  the widget knows neither pipelines nor contexts")
