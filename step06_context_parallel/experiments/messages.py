"""How many messages, how many bytes, and whether the result is the same."""

from common.config import TrainConfig
from common.drawing.tables import print_table
from common.experiments.counting import Counted, counted, mean_rank, print_counted
from common.experiments.gradients import compare_with_one_process
from common.experiments.local_ranks import on_ranks
from common.experiments.training_step import on_every_case
from common.presets import PRESETS
from common.process_groups import Mesh
from step06_context_parallel import cost, train
from step06_context_parallel.cost import SPLITS
from step06_context_parallel.experiments.tools import MODES, SHAPE, WIDTHS, AttentionLayer


def messages(quick: bool) -> None:
    """Messages and bytes of one attention layer: by formula, by the log of calls, by what the TCP sockets sent."""
    ways = [("ring", split) for split in SPLITS] + [("allgather", "zigzag"), ("ulysses", "zigzag")]
    config = TrainConfig(**SHAPE)
    tokens = config.micro_batch * config.seq_len
    for ranks in (2,) if quick else (2, 4):
        keys = {f"{mode}, {split}, {dtype}": (dtype, mode, split) for dtype in WIDTHS for mode, split in ways}
        cases = [{"cp": ranks, "dtype": d, "cp_mode": mode, "cp_split": split} for d, mode, split in keys.values()]
        cases = [SHAPE | each for each in cases]
        found = on_ranks(ranks, on_every_case, count_layer, cases, title="messages", jobs=len(cases))
        predicted = {
            name: cost.messages(mode, split, ranks, config.model_config, tokens, WIDTHS[dtype], 4)
            for name, (dtype, mode, split) in keys.items()
        }
        means = {name: mean_rank(part[index] for part in found) for index, name in enumerate(keys)}
        print_counted(f"one layer, {tokens} tokens on {ranks} ranks", predicted, means)
    compare_modes()


def count_layer(mesh: Mesh, flags: dict) -> Counted:
    """On a rank: what it sends in forward and backward of one layer."""
    layer = AttentionLayer(mesh, **flags)
    return counted(layer.both, layer.mesh)


def compare_modes() -> None:
    """PREDICTED: what a layer of a large model sends, by mode and number of ranks."""
    name, tokens, rows = "llama3-8b", 131072, []
    model = PRESETS[name]
    h, h_kv = model.heads * model.head_width, model.kv_heads * model.head_width
    for ranks in (2, 4, 8, 16, 32):
        cells = []
        for mode in MODES:
            repeated = max(1, ranks // model.kv_heads) if mode == "ulysses" else 1
            sizes = cost.layer_bytes(mode, "zigzag", ranks, tokens, h, h_kv * repeated, 2, 4)
            cells += [f"{size / 1e6:.0f}" for size in sizes.values()]
        rows.append((f"cp {ranks}", *cells))
    header = ("", *(f"{mode}: {phase}" for mode in MODES for phase in ("forward", "backward")))
    print_table(f"predicted: MB that a rank sends for one layer of {name}, {tokens:,} tokens, bfloat16", header, rows)


FLOAT64 = SHAPE | {"hidden": 64, "ffn": 96, "seq_len": 48, "global_batch": 4, "vocab": 387, "dtype": "float64"}


def gradients(quick: bool) -> None:
    """Gradients of every mode and split against one process that takes the whole global batch at once, in float64."""
    cases = [(2, name, {"cp": 2} | flags) for name, flags in MODES.items()]
    if not quick:
        for mode, flags in MODES.items():
            cases += [(4, f"{mode}, {split}", {"cp": 4, "cp_split": split} | flags) for split in SPLITS]
        cases.append((4, "ring, one K/V head", {"cp": 4, "kv_heads": 1}))
        cases.append((4, "ring, full recomputation", {"cp": 4, "recompute": "full"}))
        cases += [(4, f"dp 2 x cp 2, ZeRO {stage}", {"cp": 2, "zero": stage, "micro_batch": 1}) for stage in (1, 2, 3)]
        cases += [(4, f"cp 2 x {name} 2", {"cp": 2, name: 2}) for name in ("tp", "pp")]
    compare_with_one_process(train, [(size, name, FLOAT64 | flags) for size, name, flags in cases])
