"""The memory rows of the playbook's cheatsheet beside ours, for one layout: bytes of a rank.

The cheatsheet counts in `model_bf16` = 2 x layers x 16 h^2 bytes (its A2: attention 4 h^2, a gated MLP 12 h^2) and
has neither embeddings nor fewer heads of keys and values. Its activations come from the text: 34 s b h for each layer.
"""

from argparse import ArgumentParser, Namespace

from common.config import spelled
from common.drawing.tables import print_table
from common.errors import UsageError
from common.model_config import ModelConfig
from step01_single_gpu.memory_model import gpt
from step08_5d.cost import Layout
from step08_5d.planning.command_line import DEFAULTS, Command, add_degrees, add_global_batch, add_model, model_of
from step08_5d.planning.memory.peak import peak, states
from step08_5d.planning.memory.report import configuration

Rows = list[tuple[str, float, float, str]]  # name, theirs, ours, why they differ


def rows(model: ModelConfig, layout: Layout) -> Rows:
    """Return the rows of the cheatsheet: bytes of theirs and ours, of the first stage. ZeRO is that of the layout."""
    ours = peak(model, layout, 0).held | states(model, layout, 0)  # each when it is most
    of_rank = layout.tp * layout.pp
    weights = 2 * model.layers * 16 * model.hidden**2 / of_rank

    def shard(stage: int) -> int:
        return layout.dp if layout.zero >= stage else 1

    activations = gpt.text_activations(gpt.from_model(model), layout.micro_batch, layout.seq, "selective")
    activations /= layout.tp * layout.cp
    state = ours["optimizer state"]
    result = [
        ("model_bf16", weights / shard(3), ours["parameters"], "layers of 16 h^2, no embedding"),
        ("grads_fp32", 2 * weights / shard(2), ours["gradients"], "the same"),
        ("model_fp32", 2 * weights / shard(1), state / 3, "the same"),
        ("optimstates", 4 * weights / shard(1), 2 * state / 3, "the same"),
        ("activs", activations, ours["activations"], "GPT's 34 s b h; fused attention and our MLP"),
        ("communication", 0.0, ours["communication"], "not in it: what messages fill"),
        ("working", 0.0, ours["working"], "not in it: a layer at work, loss"),
    ]
    return [*result, ("peak", sum(row[1] for row in result), sum(row[2] for row in result), "")]


def add_flags(parser: ArgumentParser) -> None:
    add_model(parser)
    add_degrees(parser)
    parser.add_argument("--zero", type=int, choices=range(4), default=0)
    add_global_batch(parser)


def show(options: Namespace) -> None:
    """The table for the options of the command line."""
    model = model_of(options)
    degrees = {name: getattr(options, name) for name in ("dp", "tp", "pp", "cp", "zero", "micro_batch")}
    if model.experts:
        raise UsageError(f"the cheatsheet knows no experts, and {options.model} has {model.experts}")
    words = ["--model", options.model, "--seq-len", options.seq_len, "--global-batch", options.global_batch]
    for name, value in degrees.items():
        words += [spelled(name), value]
    layout = Layout.of(configuration([*DEFAULTS.split(), *map(str, words)]))
    cells = [(name, f"{t / 1e9:.2f}", f"{o / 1e9:.2f}", why) for name, t, o, why in rows(model, layout)]
    title = f"predicted: {options.model}, the first stage's rank of 1F1B, GB"
    print_table(title, ("", "cheatsheet", "ours", "why they differ"), cells)


COMMAND = Command(add_flags, show)
