"""One layout's memory as a table: for our model by stage of the pipeline, or in the playbook's GPT form.

Formulas know what a rank keeps. What a layer needs while it works they only estimate: a dry run counts it.
"""

from common.drawing.tables import print_table
from common.errors import UsageError
from common.model_config import ModelConfig
from common.presets import resolve
from common.process_groups import Degrees
from step08_5d.cost import Layout
from step08_5d.planning import gpt_memory
from step08_5d.planning.machines import MACHINES
from step08_5d.planning.memory import of_stage
from step08_5d.planning.search import Task, check_degrees, flags, named

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
        _show_ours(options.model, model, layout, options.play)


def _show_ours(name: str, model: ModelConfig, layout: Layout, play: bool) -> None:
    stages = sorted({0, 1, layout.pp // 2, layout.pp - 1} & set(range(layout.pp)))
    held = [of_stage(model, layout, stage) for stage in stages]
    rows = []
    for stage, kinds in zip(stages, held):
        in_flight = min(layout.pp - stage, layout.micro_batches)
        rows.append((f"{stage}", in_flight, *(f"{size / 1e9:.2f}" for size in kinds.values()), f"{_all(kinds):.2f}"))
    for stage in stages if play else ():
        run = played(name, model, layout, stage)
        kinds = [*(f"{size / 1e9:.2f}" for size in run.at_peak.values()), ""]
        rows.append((f"{stage}, played", rows[stages.index(stage)][1], *kinds, f"{run.peak / 1e9:.2f}"))
    header = ("stage", "in flight", *held[0], "all")
    print_table(f"predicted: {name}, {named(layout)}, GB of each rank of a stage, under 1F1B", header, rows)
    fullest = max(range(len(held)), key=lambda index: _all(held[index]))
    most = max(held[fullest], key=held[fullest].get)
    print(f"  the fullest is stage {stages[fullest]}: {_all(held[fullest]):.1f} GB, most of it {most}")


def played(name: str, model: ModelConfig, layout: Layout, stage: int):
    """Return the `DryRun` of the first rank of a stage, with the micro-batches that fill the pipeline and no more."""
    from step08_5d.planning.dry_run import configuration, dry_run, first_ranks  # here, as it imports all that trains

    short = layout._replace(micro_batches=min(layout.micro_batches, layout.pp + 1))
    world, sequences = layout.copies * layout.tp * layout.pp, layout.dp * layout.micro_batch * short.micro_batches
    task = Task(name, model, world, layout.seq, sequences, MACHINES["H100"])
    config = configuration(flags(task, short), world)
    return dry_run(config, first_ranks(Degrees.of(config))[stage], progress=True)


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
