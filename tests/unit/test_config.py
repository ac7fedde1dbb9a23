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
from common.config import Link, TrainConfig
from common.counts import count_flops, count_parameters
from common.errors import UsageError
from common.initialisation import materialise, random_values
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


def refusal(function, *args, **kwargs) -> str:
    """The one line that a UsageError says."""
    with pytest.raises(UsageError) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOTALS)
def test_parameters_of_presets(name):
    assert count_parameters(PRESETS[name]).total == TOTALS[name]


@pytest.mark.parametrize("name", [name for name, model in PRESETS.items() if not model.experts])
def test_parameters_of_the_real_module(name):
    """Built on the meta device, 405B included."""
    model = Decoder(PRESETS[name])
    assert count_parameters(PRESETS[name]).total == sum(p.numel() for p in model.parameters())


def test_parameters_by_part():
    count = count_parameters(PRESETS["llama3-8b"])
    assert count.embedding == count.head == 128256 * 4096
    assert count.attention == 4096 * 4096 * 2 + 4096 * 1024 * 2
    assert count.dense_mlp == 3 * 4096 * 14336
    assert count.norms == 65 * 4096
    assert count.active == count.total
    assert count_parameters(PRESETS["llama3-1b"]).head == 0  # tied


def test_parameters_of_experts():
    assert count_parameters(PRESETS["mixtral-8x7b"]).active == 12_879_925_248  # the card says 12.9B
    deepseek = count_parameters(PRESETS["deepseek-v3-like"])
    latent = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168  # MLA, a layer
    more = 61 * (deepseek.attention - latent)
    assert round((deepseek.total - more) / 1e9) == 671 and int((deepseek.active - more) / 1e9) == 37
    count = count_parameters(MOE)
    assert count.moe == 7 * 3 * 16 * 12 + 16 * 6 and count.moe_active == 3 * 3 * 16 * 12 + 16 * 6
    assert count.total - count.active == 2 * 4 * 3 * 16 * 12  # two layers, four experts that are not chosen


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
    count = count_flops(model, seq)
    parameters = count_parameters(model)
    multiplied = parameters.total - parameters.embedding - parameters.norms
    assert count.model == seq * (6 * multiplied + 12 * model.layers * model.hidden * seq)
    assert count.hardware("none") == count.model
    assert count.hardware("selective") == count.model + count.attention_core
    assert count.hardware("full") == count.model + count.forward - count.head
    assert 1.30 < count.hardware("full") / count.model < 4 / 3


def test_flops_of_experts():
    count = count_flops(MOE, 10)
    active = 3 * 2 * (16 * 16 + 16 * 8) + 3 * 16 * 40 + 2 * (3 * 3 * 16 * 12 + 16 * 6)
    assert count.linear == 2 * 10 * active


# ---- the command line ---------------------------------------------------------------------------------


def valid(*argv: str, step=2, world=1) -> TrainConfig:
    config = parse(step, list(argv))
    config.resolve_and_check(world)
    return config


def test_defaults():
    config = valid()
    assert (config.lr, config.warmup, config.clip) == (1e-3, 10, 1.0) and config.steps <= 100
    assert config.model_config == PRESETS["debug"] and config.torch_dtype is torch.float32
    assert config.dp == 1 and config.accumulation_steps == 4
    assert config.link_model is None and config.trace_range is None
    assert config == dataclasses.replace(TrainConfig(dp=1), step_name=STEP_NAMES[1])


def test_every_field_is_a_flag():
    for item in dataclasses.fields(TrainConfig):
        if item.name != "step_name":
            assert f"--{item.name.replace('_', '-')}" in parser(8).format_help()
    values = {
        "--seq-len": "64",
        "--lr": "3e-4",
        "--run-dir": "runs/x",
        "--dtype": "float64",
        "--dp-mode": "naive",
    }
    config = parse(2, [part for pair in values.items() for part in pair] + ["--profile"])
    assert (config.seq_len, config.lr, config.run_dir) == (64, 3e-4, "runs/x")
    assert (config.torch_dtype, config.dp_mode, config.profile) == (torch.float64, "naive", True)


def test_dp_becomes_what_remains():
    config = valid("--global-batch", "16", world=4)
    assert config.dp == 4 and config.accumulation_steps == 2
    assert valid("--dp", "2", world=2).dp == 2


def test_learning_rate_warms_up():
    config = valid("--lr", "1", "--warmup", "4")
    assert [config.learning_rate(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert valid("--warmup", "0").learning_rate(0) == 1e-3


def test_replacements_of_the_model():
    model = valid("--layers", "2", "--hidden", "96", "--heads", "6", "--ffn", "200", "--vocab", "500").model_config
    assert (model.layers, model.hidden, model.heads, model.ffn, model.vocab) == (2, 96, 6, 200, 500)
    assert model.kv_heads == 2  # of the preset's 4, what divides 6
    assert valid("--heads", "6", "--hidden", "96", "--kv-heads", "6").model_config.kv_heads == 6
    assert valid("--model", "smollm-135m", "--layers", "1").model_config.hidden == 576


def test_tie_embeddings_three_ways():
    for model, tied in (("debug", False), ("smollm-135m", True)):
        assert valid("--model", model).model_config.tie_embeddings is tied
        assert valid("--model", model, "--tie-embeddings").model_config.tie_embeddings is True
        assert valid("--model", model, "--no-tie-embeddings").model_config.tie_embeddings is False


def test_model_file(tmp_path):
    values = {"model_type": "llama", "vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 1}
    values |= {"num_attention_heads": 2, "intermediate_size": 48, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert valid("--model", str(tmp_path)).model_config.head_width == 8
    assert valid("--model", str(tmp_path), "--heads", "4").model_config.head_width == 8  # 32 / 4
    assert valid("--model", str(tmp_path / "config.json"), "--hidden", "64").model_config.head_width == 32


def test_link_and_trace():
    link = valid("--link", "50,1.5").link_model
    assert link == Link(alpha=pytest.approx(50e-6), bandwidth=1.5e9)
    assert valid("--link", "0,1").link_model.alpha == 0
    assert valid("--trace", "3:5", "--run-dir", "x").trace_range == (3, 5)
    assert valid("--trace", "0:0", "--run-dir", "x").trace_range == (0, 0)


# ---- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--dp 2", "--dp=2", "--dp-mode naive", "--bucket-mb 1"])
def test_flags_of_later_steps(flag):
    name = flag.split()[0].partition("=")[0]
    expected = f"{name} is not a flag of step01_single_gpu; it comes with step02_data_parallel"
    assert refusal(parse, 1, flag.split()) == expected
    parse(2, flag.split())


@pytest.mark.parametrize(
    "argv, expected",
    [
        ("--no-such-flag 3", "--no-such-flag is not a flag of step02_data_parallel"),
        ("--laye 3", "--laye is not a flag of step02_data_parallel"),  # no abbreviations
        ("stray", "stray is not a flag of step02_data_parallel"),
        ("--steps many", "argument --steps: invalid int value: 'many'"),
        ("--lr", "argument --lr: expected one argument"),
        ("--dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("--optimizer lion", "argument --optimizer: invalid choice: 'lion'"),
        ("--attention flash", "argument --attention: invalid choice: 'flash'"),
        ("--recompute some", "argument --recompute: invalid choice: 'some'"),
        ("--device tpu", "argument --device: invalid choice: 'tpu'"),
        ("--dp-mode slow", "argument --dp-mode: invalid choice: 'slow'"),
    ],
)
def test_what_the_parser_refuses(argv, expected):
    assert refusal(parse, 2, argv.split()).startswith(expected)


@pytest.mark.parametrize(
    "argv, expected",
    [
        ("--seq-len 0", "--seq-len 0 must be at least 1"),
        ("--micro-batch 0", "--micro-batch 0 must be at least 1"),
        ("--global-batch -8", "--global-batch -8 must be at least 1"),
        ("--steps 0", "--steps 0 must be at least 1"),
        ("--warmup -1", "--warmup -1 must be at least 0"),
        ("--weight-decay -0.1", "--weight-decay -0.1 must be at least 0"),
        ("--clip -1", "--clip -1.0 must be at least 0"),
        ("--clip nan", "--clip nan must be at least 0"),
        ("--seed -1", "--seed -1 must be at least 0"),
        ("--save-every -1", "--save-every -1 must be at least 0"),
        ("--keep -1", "--keep -1 must be at least 0"),
        ("--dp 0", "--dp 0 must be at least 1"),
        ("--lr 0", "--lr 0.0 must be positive"),
        ("--lr nan", "--lr nan must be positive"),
        ("--timeout 0", "--timeout 0.0 must be positive"),
        ("--bucket-mb 0", "--bucket-mb 0.0 must be positive"),
        ("--peak-tflops -1", "--peak-tflops -1.0 must be positive"),
        ("--vocab 0", "--vocab 0 must be at least 1"),
        ("--hidden 0", "--hidden 0 must be at least 1"),
        ("--layers 0", "--layers 0 must be at least 1"),
        ("--heads 0", "--heads 0 must be at least 1"),
        ("--kv-heads 0", "--kv-heads 0 must be at least 1"),
        ("--ffn 0", "--ffn 0 must be at least 1"),
        ("--heads 3", "--heads 3 does not divide --hidden 128"),
        ("--hidden 100", "--heads 8 does not divide --hidden 100"),
        ("--kv-heads 3", "--kv-heads 3 does not divide --heads 8"),
        (
            "--hidden 24",
            "--hidden 24 over --heads 8 gives heads of odd width 3; rotary embeddings turn pairs",
        ),
        ("--model mixtral-8x7b", "--model mixtral-8x7b has experts, which this step does not train"),
        (
            "--model smollm-135m --seq-len 4096",
            "--seq-len 4096 exceeds the 2048 positions of --model smollm-135m",
        ),
        ("--dp 3", "--dp 3 does not equal the world size 1"),
        ("--global-batch 3", "--global-batch 3 is not divisible by --micro-batch 2 x dp 1"),
        ("--link fast", "--link fast is not ALPHA_US,GB_PER_S, such as 50,1.5"),
        ("--link 50", "--link 50 is not ALPHA_US,GB_PER_S, such as 50,1.5"),
        ("--link 1,2,3", "--link 1,2,3 is not ALPHA_US,GB_PER_S, such as 50,1.5"),
        ("--link=-1,1", "--link -1,1: the latency must lie in 0..1e9 us and the bandwidth be positive"),
        ("--link nan,1", "--link nan,1: the latency must lie in 0..1e9 us and the bandwidth be positive"),
        ("--link 1,0", "--link 1,0: the latency must lie in 0..1e9 us and the bandwidth be positive"),
        ("--link 1,nan", "--link 1,nan: the latency must lie in 0..1e9 us and the bandwidth be positive"),
        ("--trace 5 --run-dir x", "--trace 5 is not FIRST:LAST, such as 3:5"),
        ("--trace 5:3 --run-dir x", "--trace 5:3 is not FIRST:LAST, such as 3:5"),
        ("--trace a:b --run-dir x", "--trace a:b is not FIRST:LAST, such as 3:5"),
        ("--trace 1:² --run-dir x", "--trace 1:² is not FIRST:LAST, such as 3:5"),
        ("--trace=-1:2 --run-dir x", "--trace -1:2 is not FIRST:LAST, such as 3:5"),
        ("--trace 9:9 --steps 9 --run-dir x", "--trace 9:9 begins after the last of --steps 9, which is 8"),
        ("--trace 3:5", "--trace needs --run-dir to write to"),
        ("--save-every 5", "--save-every needs --run-dir to write to"),
        ("--keep 2", "--keep needs --save-every, which writes checkpoints"),
        ("--async-save", "--async-save needs --save-every, which writes checkpoints"),
        ("--profile", "--profile needs --run-dir to write to"),
        ("--memory-snapshot", "--memory-snapshot needs --run-dir to write to"),
        (
            "--profile --run-dir x",
            "--profile and --memory-snapshot cover the steps of --trace FIRST:LAST, which is missing",
        ),
        ("--resume auto", "--resume auto looks into --run-dir, which is missing"),
        (
            "--model llama9",
            f"--model llama9 is no preset ({', '.join(PRESETS)}), configuration file or Hub name",
        ),
    ],
)
def test_what_validation_refuses(argv, expected):
    assert refusal(valid, *argv.split()) == expected


def test_what_the_world_size_refuses():
    expected = "--global-batch 8 is not divisible by --micro-batch 2 x dp 3"
    assert refusal(valid, world=3) == expected
    assert refusal(valid, "--dp", "2", world=4) == "--dp 2 does not equal the world size 4"
    expected = "step01_single_gpu is one process, not 2; step02_data_parallel takes several"
    assert refusal(valid, step=1, world=2) == expected
    valid(step=1)


@pytest.mark.parametrize(
    "argv, world, expected",
    [
        ("--tp 0", 1, "--tp 0 must be at least 1"),
        ("--tp 3", 3, "--tp 3 does not divide --heads 8"),
        ("--tp 3 --heads 6 --hidden 96 --ffn 100", 3, "--tp 3 does not divide --ffn 100"),
        ("--tp 4 --heads 12 --hidden 96 --kv-heads 6", 4, "--tp 4 and --kv-heads 6: one must divide the other"),
        (
            "--tp 2 --seq-len 255",
            2,
            "--tp 2 does not divide --seq-len 255 (or use --no-sequence-parallel)",
        ),
        (
            "--tp 2 --tp-mode chunked --no-sequence-parallel",
            2,
            "--tp-mode chunked splits gathers along the sequence: it needs --sequence-parallel",
        ),
        ("--tp 2 --dp 2", 2, "--tp 2 x --dp 2 does not equal the world size 2"),
        ("--tp 2", 3, "--tp 2 x --dp 1 does not equal the world size 3"),
        ("--tp 4", 2, "--tp 4 x --dp 1 does not equal the world size 2"),
        ("--tp 2", 1, "--tp 2 x --dp 1 does not equal the world size 1"),
        ("--tp 2 --zero 1 --zero-replicas 2", 2, "--zero-replicas 2 does not divide dp 1"),
    ],
)
def test_what_tensor_parallelism_refuses(argv, world, expected):
    assert refusal(valid, *argv.split(), step=4, world=world) == expected


def test_tensor_parallel_degrees():
    config = valid("--tp", "2", "--global-batch", "16", step=4, world=8)
    assert config.dp == 4 and config.accumulation_steps == 2
    assert config.sequence_parallel and config.tp_mode == "overlap"
    for argv in ("--tp 8", "--tp 8 --kv-heads 1", "--tp 4 --seq-len 255 --no-sequence-parallel --tp-mode plain"):
        valid(*argv.split(), step=4, world=8)
    assert valid("--vocab", "257", "--tp", "2", step=4, world=2).model_config.vocab == 257, "it is padded, not refused"
    assert refusal(parse, 3, ["--tp", "2"]) == "--tp is not a flag of step03_zero; it comes with step04_tensor_parallel"
    assert refusal(parse, 4, ["--tp-mode", "ring"]).startswith("argument --tp-mode: invalid choice: 'ring'")


@pytest.mark.parametrize(
    "argv, world, expected",
    [
        ("--zero 1 --zero-replicas 3", 4, "--zero-replicas 3 does not divide dp 4"),
        ("--zero 3 --zero-replicas 4", 2, "--zero-replicas 4 does not divide dp 2"),
        ("--zero 2 --zero-replicas 0", 2, "--zero-replicas 0 must be at least 1"),
        ("--zero-replicas 2", 2, "--zero-replicas 2 needs --zero 1, 2 or 3"),
        ("--zero 1 --dp-mode naive", 2, "--dp-mode naive needs --zero 0; stages 1 to 3 work on buckets"),
        ("--zero 3 --dp-mode overlap", 1, "--dp-mode overlap needs --zero 0; stages 1 to 3 work on buckets"),
        ("--zero 1 --zero-reduce step", 2, "--zero-reduce step needs --zero 2 or 3; others do so anyway"),
        ("--zero-reduce step", 2, "--zero-reduce step needs --zero 2 or 3; others do so anyway"),
        ("--zero 5", 2, "argument --zero: invalid choice: 5"),
        ("--zero two", 2, "argument --zero: invalid int value: 'two'"),
        ("--zero-reduce never", 2, "argument --zero-reduce: invalid choice: 'never'"),
    ],
)
def test_what_zero_refuses(argv, world, expected):
    assert refusal(valid, "--global-batch", "8", *argv.split(), step=3, world=world).startswith(expected)


def test_zero_flags_that_go_together():
    for replicas in (1, 2, 4):
        config = valid("--zero", "3", "--zero-replicas", str(replicas), "--zero-reduce", "step", step=3, world=4)
        assert (config.zero, config.zero_replicas, config.dp) == (3, replicas, 4)
    assert valid("--dp-mode", "naive", step=3, world=2).zero == 0
    expected = "--zero is not a flag of step02_data_parallel; it comes with step03_zero"
    assert refusal(parse, 2, ["--zero", "1"]) == expected


def test_a_refused_degree_ends_with_status_2():
    script = ROOT / "step04_tensor_parallel" / "train.py"
    done = subprocess.run([sys.executable, script, "--tp", "3"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: --tp 3 does not divide --heads 8\n")


def test_model_configurations_that_do_not_fit():
    moe = dataclasses.replace(MOE, top_k=7)
    assert refusal(moe.check) == "--top-k 7 must lie between 1 and --experts 6"
    assert refusal(dataclasses.replace(MOE, top_k=0).check) == "--top-k 0 must lie between 1 and --experts 6"
    debug = PRESETS["debug"]
    for change, expected in (
        ({"head_dim": -2}, "heads of width -2 are too narrow; rotary embeddings turn pairs"),
        ({"norm_eps": 0.0}, "the model's norm_eps 0.0 must be positive"),
        ({"rope_theta": float("nan")}, "the model's rope_theta nan must be positive"),
    ):
        assert refusal(dataclasses.replace(debug, **change).check) == expected
    assert "parameters, more than 10,000,000,000,000" in refusal(valid, "--hidden", "100000000000")
    for model in PRESETS.values():
        model.check()


def test_bad_arguments_of_a_command_are_one_line(capsys):
    command = OneLineParser(prog="command")
    command.add_argument("run")
    with pytest.raises(SystemExit) as stop:
        command.parse_or_exit([])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: the following arguments are required: run\n"


@pytest.mark.parametrize("rank, printed", [("0", True), ("1", False)])
def test_help_is_printed_once(rank, printed):
    """Under torchrun every rank sees --help; here as a process with a command line of its own."""
    code = "from common.command_line import parse; parse(2)"
    command = [sys.executable, "-c", code, "--help"]
    done = subprocess.run(command, cwd=ROOT, env={"RANK": rank}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("--dp-mode" in done.stdout) == printed
