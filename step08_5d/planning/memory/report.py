"""What one layout holds, as a table with a line for each stage of its pipeline.

It takes the flags of step 8, so that the words of a command (that `plan` has printed, say) can be copied. What the
formula does not know is refused in a line. `--play` adds a dry run of each stage, which counts what the formula says.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import replace

from common.config import TrainConfig, flag_names, spelled
from common.drawing.tables import print_table
from common.errors import UsageError
from common.launching.command_line import parse
from common.launching.run_mesh import degrees_of
from common.model_config import ModelConfig
from step08_5d import config as step08
from step08_5d.cost import Layout
from step08_5d.planning.command_line import Command, add_global_batch, add_model, words_of
from step08_5d.planning.memory.backwards import fullest_ranks, in_flight
from step08_5d.planning.memory.ledger import Tensors
from step08_5d.planning.memory.peak import peak
from step08_5d.planning.memory.walks import layer_ledger
from step08_5d.planning.search import named
from step08_5d.planning.stages import layers_of_ranks

# The flags of step 8 that the formula knows, and the schedules
KNOWN = set(
    "dp tp pp cp ep zero micro_batch global_batch seq_len dtype recompute schedule virtual_stages cp_mode".split()
)
KNOWN |= {"zero_replicas", "order"} | set(flag_names("model")) - {"init_from", "fp8", "fp8_gradients", "fp8_dispatch"}
SCHEDULES = ("1f1b", "interleaved", "naive", "afab", "zb-h1", "zb-h2")


def add_flags(parser: ArgumentParser) -> None:
    add_model(parser)
    add_global_batch(parser)
    parser.add_argument("--play", action="store_true", help="also a dry run of each stage, on fake tensors")
    parser.add_argument("--layer", action="store_true", help="also the backward of a layer, tensor by tensor")


def show(options: Namespace) -> None:
    """What one layout holds, by kind, on the ranks of its pipeline."""
    config = configuration(words_of(options))
    model, layout = config.model_config, Layout.of(config)
    show_stages(config, layout, options.play)
    if options.layer:
        for experts in sorted({model.has_experts(index) for index in range(model.blocks)}):
            show_layer(model, layout, experts=experts)


def configuration(argv: list[str]) -> TrainConfig:
    """The configuration that these flags of step 8 describe, on as many ranks as its degrees make.

    Raises UsageError for what step 8 would refuse, and for what the formula of memory does not know.
    """
    config, default = parse(8, argv), TrainConfig(step_name="step08_5d")
    for name, value in vars(config).items():
        if name not in KNOWN and value != getattr(default, name):
            flag = {True: spelled(name), False: f"--no-{name.replace('_', '-')}"}.get(value, f"{spelled(name)} {value}")
            other = "" if name in ("mask_documents", "init_from") else "; dry-run takes it"
            raise UsageError(f"{flag} is not in the formula of memory{other}")
    if config.schedule not in SCHEDULES:
        raise UsageError(f"--schedule {config.schedule}: the formula knows {', '.join(SCHEDULES)}; dry-run all others")
    if config.model_config.latent and config.cp > 1 and config.cp_mode != "ring":
        words = "of latent attention's ways over cp, the formula of memory knows the ring; dry-run takes all"
        raise UsageError(f"--cp-mode {config.cp_mode}: {words}")
    config.dp = 1 if config.dp is None else config.dp
    config.resolve_and_check(config.dp * config.tp * config.pp * config.cp)
    step08.check(config)
    return config


def show_stages(config: TrainConfig, layout: Layout, play: bool) -> None:
    """Print what the ranks of a pipeline hold that may be fullest; with `play` also what a dry run of each counts."""
    model = config.model_config
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
        run = played(config, stage)
        kinds = [*(f"{size / 1e9:.2f}" for size in run.at_peak.values()), ""]
        rows.append((f"{stage}, played", *rows[stages.index(stage)][1:3], *kinds, f"{run.peak / 1e9:.2f}"))
    header = ("rank" if layout.stages > 1 else "stage", "layers", "in flight", *held[0], "all")
    schedule = "interleaved" if layout.stages > 1 else f"under {layout.schedule.upper()}"
    given, default, title = vars(config), TrainConfig(), config.model
    for name in (each for each in flag_names("model") if each not in ("model", "dtype")):
        title += f" {spelled(name)} {given[name]}" if given[name] != getattr(default, name) else ""
    title = f"predicted: {title}, {named(layout)}, GB of a rank of the pipeline, {schedule}"
    print_table(title, header, rows)
    fullest = max(range(len(held)), key=lambda index: _all(held[index]))
    most = max(held[fullest], key=held[fullest].get)
    print(f"  the fullest is {header[0]} {stages[fullest]}: {_all(held[fullest]):.1f} GB, most of it {most};")
    print(f"  its fullest moment: {peaks[fullest].moment}. Head and loss are fused; without, logits are held, too")


def show_layer(model: ModelConfig, layout: Layout, *, experts: bool) -> None:
    """Print the ledger of a layer's backward: what each event makes and releases, and what is held meanwhile."""
    ledger = layer_ledger(model, layout, experts)
    before = sum(ledger.begins_with.values())
    rows = _listed("it begins with", before, {"+": ledger.begins_with})
    for each in ledger.entries:
        rows += _listed(each.name, before + each.held, {"+": each.made, "-": each.released, "=": each.left})
    title = "the backward of a layer with experts" if experts else "the backward of a layer"
    print_table(
        f"predicted: {title}, MB of a micro-batch",
        ("+ is made; then - is released, = takes its place", "MB", "held"),
        rows,
    )


def _listed(event: str, held: float, tensors: dict[str, Tensors]) -> list[tuple[str, str, str]]:
    """A row for the event, and one for each of its tensors, by the sign before them."""
    changes = [(f"  {sign} {name}", size) for sign, some in tensors.items() for name, size in some.items()]
    return [(event, "", f"{held / 1e6:,.1f}"), *((name, f"{size / 1e6:,.1f}", "") for name, size in changes if size)]


def played(config: TrainConfig, stage: int):
    """Return the `DryRun` of the first rank of a stage, with the micro-batches that fill the pipeline and no more."""
    from step08_5d.planning.dry_run.play import dry_run, first_ranks  # here, as it imports all that trains

    filling = config.pp + 1 if (config.virtual_stages or 1) == 1 else 2 * config.pp
    micro_batches = min(config.accumulation_steps, filling)
    short = replace(config, global_batch=micro_batches * config.dp * config.micro_batch, device="cpu")
    return dry_run(short, first_ranks(degrees_of(short))[stage], progress=True)


def _all(kinds: dict[str, float]) -> float:
    return sum(kinds.values()) / 1e9


COMMAND = Command(add_flags, show, takes_more=True)
