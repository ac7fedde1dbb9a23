"""Presets, exact counts, the command line, and every refusal in one clear line."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.command_line import STEP_NAMES, OneLineParser, parse, parser
from common.config import ROLES, TrainConfig, flag_names, spelled
from common.counts import count_flops, count_parameters
from common.errors import UsageError
from common.initialisation import materialise, random_values
from common.link import Link
from common.model import Decoder, cross_entropy_sum, naive_attention
from common.model_config import ModelConfig
from common.presets import PRESETS

ROOT = Path(__file__).parents[2]
# As published in the model cards, or summed over the tensors of the published checkpoints.
TOTALS = {
    "smollm-135m": 134_515_008,
    "smollm-360m": 361_821_120,
    "smollm-1.7b": 1_711_376_384,
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
}
MOE = ModelConfig(*(100, 16, 3, 4, 2, 40, False), experts=6, top_k=2, shared_experts=1, dense_layers=1, expert_ffn=12)
FLAGS = [item for item in dataclasses.fields(TrainConfig) if item.name != "step_name"]


# ---- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_presets(name):
    """As published, and as many as the module has that is built on the meta device, 405B included."""
    model, total = PRESETS[name], count_parameters(PRESETS[name]).total
    model.check()
    assert total == TOTALS.get(name, total)
    if not model.experts:
        assert total == sum(parameter.numel() for parameter in Decoder(model).parameters())


def test_parameters_of_experts():
    assert count_parameters(PRESETS["mixtral-8x7b"]).active == 12_879_925_248  # the card says 12.9B
    deepseek = count_parameters(PRESETS["deepseek-v3-like"])
    latent = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168  # MLA, per layer
    more = 61 * (deepseek.attention - latent)
    assert round((deepseek.total - more) / 1e9) == 671 and int((deepseek.active - more) / 1e9) == 37
    count = count_parameters(MOE)
    assert count.moe == 7 * 3 * 16 * 12 + 16 * 6 and count.moe_active == 3 * 3 * 16 * 12 + 16 * 6
    assert count.total - count.active == 2 * 4 * 3 * 16 * 12  # two layers, four experts that are not chosen
    active = 3 * 2 * (16 * 16 + 16 * 8) + 3 * 16 * 40 + 2 * (3 * 3 * 16 * 12 + 16 * 6)
    assert count_flops(MOE, 10).linear == 2 * 10 * active


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(50, 32, 2, 4, 2, 40, tie_embeddings=False),
        ModelConfig(50, 32, 3, 4, 1, 40, tie_embeddings=True, head_dim=6),
    ],
)
def test_flops_of_the_real_module(config):
    """torch's counter sees the matrix products of the naive core as they are."""
    model = Decoder(config, naive_attention)
    materialise(model, torch.float32, torch.device("cpu"), random_values(0))
    tokens = torch.zeros(3, 17, dtype=torch.int64)
    with FlopCounterMode(display=False) as forward:
        loss = cross_entropy_sum(model(tokens), tokens)
    expected = count_flops(config, 17)
    assert forward.get_total_flops() == 3 * expected.forward
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() + backward.get_total_flops() == 3 * expected.model


def test_flops_of_the_playbook():
    """6 N per token (embedding rows are not multiplied) and 12 L h s for the attention core."""
    model, seq = PRESETS["llama3-8b"], 4096
    count, parameters = count_flops(model, seq), count_parameters(model)
    multiplied = parameters.total - parameters.embedding - parameters.norms
    assert count.model == seq * (6 * multiplied + 12 * model.layers * model.hidden * seq)
    assert count.hardware("none") == count.model
    assert count.hardware("selective") == count.model + count.attention_core
    assert count.hardware("full") == count.model + count.forward - count.head


# ---- the command line ------------------------------------------------------------------------------------------------


def valid(flags: str, step: int = 5, world: int = 1) -> TrainConfig:
    config = parse(step, flags.split())
    config.resolve_and_check(world)
    return config


def test_every_field_is_a_flag_of_one_role():
    for item in FLAGS:
        assert spelled(item.name) in parser(item.metadata["step"]).format_help()
        if item.metadata["step"] > 1:
            with pytest.raises(UsageError, match=f"{spelled(item.name)} .*{STEP_NAMES[item.metadata['step'] - 1]}"):
                parse(item.metadata["step"] - 1, [spelled(item.name)])
    names = [item.name for item in FLAGS]
    assert sorted(sum((flag_names(role) for role in ROLES), ())) == sorted(names)
    assert flag_names(*ROLES) == tuple(names) and flag_names("update", "model") == flag_names("model", "update")


def test_flags_set_their_fields():
    assert valid("") == dataclasses.replace(TrainConfig(dp=1), step_name=STEP_NAMES[4])
    config = valid("--seq-len 64 --lr=3e-4 --dtype float64 --no-sequence-parallel --trace 0:3 --profile --run-dir x")
    assert (config.seq_len, config.lr, config.torch_dtype, config.run_dir) == (64, 3e-4, torch.float64, "x")
    assert (config.sequence_parallel, config.profile, config.trace_range) == (False, True, (0, 3))
    assert valid("--link 50,1.5").link_model == Link(alpha=pytest.approx(50e-6), bandwidth=1.5e9)


@pytest.mark.parametrize(
    ("flags", "world", "dp", "micro_batches"),
    [("", 1, 1, 4), ("--global-batch 16", 4, 4, 2), ("--tp 2 --pp 2", 8, 2, 2), ("--dp 2 --tp 2", 4, 2, 2)],
)
def test_dp_becomes_what_remains(flags, world, dp, micro_batches):
    config = valid(flags, world=world)
    assert (config.dp, config.accumulation_steps) == (dp, micro_batches)


def test_learning_rate_warms_up():
    config = valid("--lr 1 --warmup 4")
    assert [config.learning_rate(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert valid("--warmup 0").learning_rate(0) == 1e-3


def test_replacements_of_the_model(tmp_path):
    model = valid("--layers 2 --hidden 96 --heads 6 --ffn 200 --vocab 500").model_config
    assert (model.layers, model.hidden, model.heads, model.ffn, model.vocab) == (2, 96, 6, 200, 500)
    assert model.kv_heads == 2  # of the preset's 4, what divides 6
    for preset, tied in (("debug", False), ("smollm-135m", True)):
        for flag, expected in (("", tied), ("--tie-embeddings", True), ("--no-tie-embeddings", False)):
            assert valid(f"--model {preset} {flag}").model_config.tie_embeddings is expected
    values = {"model_type": "llama", "vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 1}
    values |= {"num_attention_heads": 2, "intermediate_size": 48, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert valid(f"--model {tmp_path}").model_config.head_width == 8
    assert valid(f"--model {tmp_path}/config.json --hidden 64").model_config.head_width == 32  # 64 / 2


@pytest.mark.parametrize(("rank", "printed"), [("0", True), ("1", False)])
def test_help_is_printed_once(rank, printed):
    """Under torchrun every rank sees --help; here as a process with a command line of its own."""
    command = [sys.executable, "-c", "from common.command_line import parse; parse(2)", "--help"]
    done = subprocess.run(command, cwd=ROOT, env={"RANK": rank}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("--dp-mode" in done.stdout) == printed


# ---- refusals --------------------------------------------------------------------------------------------------------

# Numbers out of range, unknown choices and names: every flag in turn with one bad value.
ONE_BAD_VALUE = """
--seq-len=0 --micro-batch=0 --global-batch=-8 --steps=0 --warmup=-1 --weight-decay=-0.1 --clip=-1.0 --clip=nan --seed=-1
--save-every=-1 --keep=-1 --dp=0 --lr=0.0 --lr=nan --lr=inf --timeout=0.0 --timeout=2000000.0 --bucket-mb=0.0
--peak-tflops=-1.0 --vocab=0 --hidden=0 --layers=0 --heads=0 --kv-heads=0 --ffn=0 --tp=0 --pp=0 --zero-replicas=0
--virtual-stages=0 --consecutive=0 --layer-delay=-1.0 --steps=many --dtype=int8 --optimizer=lion --attention=flash
--recompute=some --device=tpu --dp-mode=slow --zero=5 --zero=two --zero-reduce=never --tp-mode=ring --model=llama9
--model=mixtral-8x7b --link=fast --link=50 --link=1,2,3 --link=-1,1 --link=nan,1 --link=1,0
--link=1,nan --trace=5 --trace=5:3 --trace=a:b --trace=1:² --trace=-1:2 --trace=100:100
""".split()
# What one flag asks of another, or of the world size.
TOGETHER = [
    ("--heads 3", 1, "--heads 3 --hidden 128"),
    ("--hidden 100", 1, "--hidden 100 --heads 8"),
    ("--hidden 100000000000", 1, "--model debug parameters"),
    ("--hidden 24", 1, "--hidden 24 --heads 8 3"),  # heads of odd width
    ("--kv-heads 3", 1, "--kv-heads 3 --heads 8"),
    ("--model smollm-135m --seq-len 4096", 1, "--seq-len 4096 2048 --model smollm-135m"),
    ("--dp 3", 1, "--dp 3 1"),
    ("--dp 2", 4, "--dp 2 4"),
    ("--tp 2 --dp 2", 2, "--tp 2 --dp 2 2"),
    ("--tp 2", 3, "--tp 2 --dp 1 3"),
    ("--tp 4", 2, "--tp 4 --dp 1 2"),
    ("--pp 2", 1, "--pp 2 --dp 1 1"),
    ("--global-batch 3", 1, "--global-batch 3 --micro-batch 2 dp 1"),
    ("", 3, "--global-batch 8 --micro-batch 2 dp 3"),
    ("--tp 3", 3, "--tp 3 --heads 8"),
    ("--tp 3 --heads 6 --hidden 96 --ffn 100", 3, "--tp 3 --ffn 100"),
    ("--tp 4 --heads 12 --hidden 96 --kv-heads 6", 4, "--tp 4 --kv-heads 6"),
    ("--tp 2 --seq-len 255", 2, "--tp 2 --seq-len 255 --no-sequence-parallel"),
    ("--tp 2 --tp-mode chunked --no-sequence-parallel", 2, "--tp-mode chunked --sequence-parallel"),
    ("--pp 8", 8, "--pp 8 --layers 4"),
    ("--pp 2 --virtual-stages 3", 2, "--pp 2 6 --layers 4"),
    ("--zero 1 --zero-replicas 3", 4, "--zero-replicas 3 dp 4"),
    ("--zero-replicas 2", 2, "--zero-replicas 2 --zero"),
    ("--zero 1 --dp-mode naive", 2, "--dp-mode naive --zero 0"),
    ("--zero 1 --zero-reduce step", 2, "--zero-reduce step --zero 2"),
    ("--trace 9:9 --steps 9 --run-dir x", 1, "--trace 9:9 --steps 9"),
    ("--trace 3:5", 1, "--trace --run-dir"),
    ("--save-every 5", 1, "--save-every --run-dir"),
    ("--keep 2", 1, "--keep --save-every"),
    ("--async-save", 1, "--async-save --save-every"),
    ("--profile", 1, "--profile --trace"),
    ("--memory-snapshot", 1, "--memory-snapshot --trace"),
    ("--profile --measure-memory --trace 1:2 --run-dir x", 1, "--profile --measure-memory"),
    ("--resume auto", 1, "--resume auto --run-dir"),
    ("--no-such-flag 3", 1, "--no-such-flag"),
    ("--laye 3", 1, "--laye"),  # no abbreviations
    ("stray", 1, "stray"),
    ("--lr", 1, "--lr"),
]


@pytest.mark.parametrize(
    ("flags", "world", "named"),
    [*((each, 1, each.replace("=", " ")) for each in ONE_BAD_VALUE), *TOGETHER],
)
def test_refusals_name_flags_and_values_in_one_line(flags, world, named):
    with pytest.raises(UsageError) as caught:
        valid(flags, world=world)
    line = str(caught.value)
    assert "\n" not in line
    assert set(named.split()) <= {word.strip("':;,()") for word in line.split()}, line


def test_step_1_is_one_process():
    with pytest.raises(UsageError, match="step01_single_gpu .* 2"):
        valid("", step=1, world=2)


def test_combinations_that_are_allowed():
    for flags, world in (
        ("--tp 8 --kv-heads 1", 8),
        ("--tp 4 --seq-len 255 --no-sequence-parallel --tp-mode plain", 4),
        ("--tp 2 --vocab 257", 2),  # it is padded
        ("--zero 3 --zero-replicas 4 --zero-reduce step", 4),
        ("--resume some/path", 1),
        ("--link 0,1", 1),
    ):
        valid(flags, world=world)


@pytest.mark.parametrize(
    "change", [{"top_k": 7}, {"top_k": 0}, {"head_dim": -2}, {"norm_eps": 0.0}, {"rope_theta": float("nan")}]
)
def test_model_configurations_that_do_not_fit(change):
    ((name, value),) = change.items()
    with pytest.raises(UsageError, match=f"{name.removeprefix('head_').replace('_', '.')}|wid.*{value}"):
        dataclasses.replace(MOE, **change).check()


def test_a_refusal_ends_with_status_2():
    script = ROOT / "step04_tensor_parallel" / "train.py"
    done = subprocess.run([sys.executable, script, "--tp", "3"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: --tp 3 does not divide --heads 8\n")


def test_bad_arguments_of_other_commands_are_one_line(capsys):
    command = OneLineParser(prog="command")
    command.add_argument("run")
    with pytest.raises(SystemExit) as stop:
        command.parse_or_exit([])
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1
