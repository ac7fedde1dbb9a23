"""One layout's memory as a table: for our model by stage of the pipeline, or in the playbook's GPT form.

`--play` adds a dry run of each stage, which counts what the formula says.
"""

from common.drawing.tables import print_table
from common.errors import UsageError
from common.model_config import ModelConfig
from common.presets import resolve
from common.process_groups import Degrees
from step08_5d.cost import Layout
from step08_5d.planning import gpt_memory
from step08_5d.planning.machines import MACHINES
from step08_5d.planning.memory import peak
from step08_5d.planning.search import Task, check_degrees, flags, named
from step08_5d.planning.stages import fullest_ranks, in_flight, layers_of_ranks

DEGREES = ("dp", "tp", "pp", "cp", "ep", "zero", "micro_batch")


def show(options) -> None:
    """The table for the options of the command line."""
    model = resolve(options.model)
    layout = Layout(options.seq_len, **{name: getattr(options, name) for name in DEGREES}, dtype="bfloat16")
    layout = layout._replace(stages=options.virtual_stages)
    check_degrees(model, layout, options.sequences)
    micro_batches = max(1, options.sequences // (layout.dp * layout.micro_batch))
    layout = layout._replace(micro_batches=micro_batches, recompute=options.recompute)
    if options.form == "gpt":
        _show_gpt(options.model, model, layout)
    else:
        _show_ours(options.model, model, layout, options.play)


def _show_ours(name: str, model: ModelConfig, layout: Layout, play: bool) -> None:
    stages = sorted({1, layout.pp // 2, *fullest_ranks(model, layout)} & set(range(layout.pp)))
    layers = layers_of_ranks(model, layout)
    peaks = [peak(model, layout, stage) for stage in stages]
    held = [each.held for each in peaks]
    rows = []
    for stage, kinds in zip(stages, held):
        micro_batches = f"{round(in_flight(model, layout, stage), 2):g}"
        sizes = (f"{size / 1e9:.2f}" for size in kinds.values())
        rows.append((f"{stage}", layers[stage], micro_batches, *sizes, f"{_all(kinds):.2f}"))
    for stage in stages if play else ():
        run = played(name, model, layout, stage)
        kinds = [*(f"{size / 1e9:.2f}" for size in run.at_peak.values()), ""]
        rows.append((f"{stage}, played", *rows[stages.index(stage)][1:3], *kinds, f"{run.peak / 1e9:.2f}"))
    header = ("rank" if layout.stages > 1 else "stage", "layers", "in flight", *held[0], "all")
    schedule = "interleaved" if layout.stages > 1 else "under 1F1B"
    print_table(f"predicted: {name}, {named(layout)}, GB of a rank of the pipeline, {schedule}", header, rows)
    fullest = max(range(len(held)), key=lambda index: _all(held[index]))
    most = max(held[fullest], key=held[fullest].get)
    print(f"  the fullest is {header[0]} {stages[fullest]}: {_all(held[fullest]):.1f} GB, most of it {most};")
    print(f"  its fullest moment: {peaks[fullest].moment}")


def played(name: str, model: ModelConfig, layout: Layout, stage: int):
    """Return the `DryRun` of the first rank of a stage, with the micro-batches that fill the pipeline and no more."""
    from step08_5d.planning.dry_run import configuration, dry_run, first_ranks  # here, as it imports all that trains

    filling = layout.pp + 1 if layout.stages == 1 else 2 * layout.pp
    short = layout._replace(micro_batches=min(layout.micro_batches, filling))
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
