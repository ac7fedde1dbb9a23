"""Presets, exact counts, the command line, and every refusal in one clear line."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.config import ROLES, TrainConfig, flag_names, spelled
from common.counts import count_flops, count_parameters
from common.errors import UsageError
from common.launching.command_line import STEP_NAMES, parse, parser
from common.link import Link
from common.model import Decoder, cross_entropy_sum, naive_attention
from common.model_config import ModelConfig
from common.presets import PRESETS
from common.weights.initialisation import materialise, random_values
from tests.harness.observing import configure
from tests.harness.ranks import run_command

ROOT = Path(__file__).parents[2]
TOTALS = {  # as published in the model cards, or summed over the tensors of the published checkpoints
    **{"smollm-135m": 134_515_008, "smollm-360m": 361_821_120, "smollm-1.7b": 1_711_376_384},
    **{"llama3-1b": 1_235_814_400, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496},
    **{"llama3-405b": 405_853_388_800, "mixtral-8x7b": 46_702_792_704},
}
MOE = ModelConfig(*(100, 16, 3, 4, 2, 40, False), experts=6, top_k=2, shared_experts=1, dense_layers=1, expert_ffn=12)
FLAGS = [item for item in dataclasses.fields(TrainConfig) if item.name != "step_name"]


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


def test_flops_with_tied_weights_and_another_head_width():
    """torch's counter sees the matrix products of the naive core as they are. Other models: step 1's recomputation."""
    config = ModelConfig(50, 32, 3, 4, 1, 40, True, head_dim=6)
    model = Decoder(config, naive_attention)
    materialise(model, torch.float32, torch.device("cpu"), random_values(0))
    tokens = torch.zeros(3, 17, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        cross_entropy_sum(model(tokens), tokens).backward()
    assert counter.get_total_flops() == 3 * count_flops(config, 17).model


def valid(flags: str, step: int = 6, world: int = 1) -> TrainConfig:
    return configure(step, flags, world)


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
    config = valid("--lr 1 --warmup 4")
    assert config == TrainConfig(step_name=STEP_NAMES[5], dp=1, lr=1.0, warmup=4)
    assert [config.learning_rate(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    config = valid("--seq-len 64 --lr=3e-4 --dtype float64 --no-sequence-parallel --trace 0:3 --profile --run-dir x")
    assert (config.seq_len, config.lr, config.torch_dtype, config.run_dir) == (64, 3e-4, torch.float64, "x")
    assert (config.sequence_parallel, config.profile, config.trace_range) == (False, True, (0, 3))
    config = valid("--tp 2 --pp 2", world=8)
    assert (config.dp, config.accumulation_steps) == (2, 2), "dp becomes what remains"
    assert valid("--link 50,1.5").link_model == Link(alpha=pytest.approx(50e-6), bandwidth=1.5e9)


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


def test_help_is_printed_once(monkeypatch, capsys):
    """Under torchrun every rank sees --help."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    for rank, printed in ("0", True), ("1", False):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="0"):
            parse(2)
        assert ("--dp-mode" in capsys.readouterr().out) == printed


def test_heavy_packages_are_imported_only_where_they_are_used():
    """Sixteen ranks would each spend seconds on them; a preset does not need them."""
    heavy = {"transformers", "datasets", "matplotlib", "torch.distributed.checkpoint", "pandas", "pyarrow"}
    code = "import sys, common.config, step02_data_parallel.train\ncommon.config.TrainConfig(model='llama3-8b')"
    assert run_command([sys.executable, "-c", f"{code}.model_config\nprint({heavy} & sys.modules.keys())"]).stdout == (
        "set()\n"
    )


REFUSED = {  # by world size: flags named in the error line | others that are only given | others that are only named
    1: """--seq-len 0; --micro-batch 0; --global-batch -8; --steps 0; --warmup -1; --weight-decay -0.1; --clip -1.0;
    --clip nan; --seed -1; --save-every -1; --keep -1; --dp 0; --lr 0.0; --lr nan; --lr inf; --timeout 0.0;
    --timeout 2000000.0; --bucket-mb 0.0; --peak-tflops -1.0; --vocab 0; --hidden 0; --layers 0; --heads 0;
    --kv-heads 0; --ffn 0; --tp 0; --pp 0; --zero-replicas 0; --virtual-stages 0; --consecutive 0;
    --layer-delay -1.0; --compute 0.0;
    --steps many; --dtype int8; --optimizer lion; --attention flash; --recompute some;
    --device tpu; --dp-mode slow; --zero 5; --lr; --zero two; --zero-reduce never; --tp-mode ring; --model llama9;
    --cp-mode p2p; --cp-split odd; --cp 2; --cp 0;
    --model mixtral-8x7b; --link fast; --link 50; --link 1,2,3; --link=-1,1; --link nan,1; --link 1,0;
    --link 1,nan; --trace 5; --trace 5:3; --trace a:b; --trace 1:²; --trace=-1:2; --trace 100:100; --heads 3;
    --hidden 100; --hidden 24; --model debug | --hidden 100000000000; --dp 3; --kv-heads 3;
    --seq-len 4096 --model smollm-135m; --pp 2; --tp 2; --global-batch 3; stray; --no-such-flag; --laye;
    --trace | 3:5 | --run-dir; --save-every | 5 | --run-dir; --resume auto | | --run-dir; --profile | | --trace;
    --memory-snapshot | | --trace; --keep | 2 | --save-every; --async-save | | --save-every;
    --profile --measure-memory | --trace 1:2 --run-dir x""",
    2: """--tp 2 --dp 2; --tp 4; --tp 2 --seq-len 255; --tp-mode chunked | --tp 2 --no-sequence-parallel; --pp 3;
    --zero-replicas 2; --pp 2 | --virtual-stages 3; --dp-mode naive | --zero 1; --zero-reduce step | --zero 1;
    --zero-reduce step; --cp 2 --dp 2""",
    3: "--tp 3; --tp 2; --tp 3 --ffn 100 | --heads 6 --hidden 96; --global-batch 8",
    4: """--dp 2; --zero-replicas 3 | --zero 1; --tp 4 --kv-heads 6 | --heads 12 --hidden 96;
    --cp 2 --tp 2 --pp 2 --dp 1; --tp 2 --cp 2 --seq-len 62; --zero-replicas 3 | --cp 2 --zero 1""",
    8: "--pp 8; --pp 16",
}


@pytest.mark.parametrize("world, case", [(world, case) for world in REFUSED for case in REFUSED[world].split(";")])
def test_refusals_name_the_flag_and_its_value_in_one_line(world, case):
    named, scene, also = (case.split("|") + ["", ""])[:3]
    with pytest.raises(UsageError) as caught:
        valid(f"{named} {scene}", world=world)
    words = {word.strip("':;,()") for word in str(caught.value).split()}
    assert set(f"{named} {also}".replace("=", " ").split()) <= words and "\n" not in str(caught.value), caught.value


@pytest.mark.parametrize(
    "flags, named",
    [("--cp 4", "--cp 4 does not divide"), ("--tp 2 --pp 2", "--tp 2 x --pp 2 does not divide")]
    + [("--cp 2 --dp 1", "--cp 2 x --dp 1 does not equal"), ("--dp 4", "--dp 4 does not equal")],
)
def test_only_degrees_that_were_given_are_named(flags, named):
    with pytest.raises(UsageError, match=f"^{named} the world size 6$"):
        valid(flags, world=6)


def test_what_is_allowed_in_which_world():
    valid("--tp 8 --kv-heads 1", world=8)
    valid("--tp 4 --seq-len 255 --no-sequence-parallel --tp-mode plain", world=4)
    valid("--tp 2 --vocab 257 --link 0,1", world=2)  # the vocabulary is padded
    valid("--zero 3 --zero-replicas 4 --zero-reduce step --resume some/path", world=4)
    with pytest.raises(UsageError, match="step01_single_gpu .* 2"):
        valid("", step=1, world=2)


def test_flags_that_need_another_device():
    slower = [(flags, "cuda") for flags in ("--link 50,1.5", "--compute 2.5", "--layer-delay 2.5")]
    for flags, kind in [*slower, ("--memory-snapshot", "cpu")]:
        config = valid(f"{flags} --trace 1:2 --run-dir x")
        with pytest.raises(UsageError, match=f"^{flags} [^\n]*$"):
            config.check_device(kind)
        config.check_device({"cpu": "cuda", "cuda": "cpu"}[kind])


def test_model_configurations_that_do_not_fit():
    for name, value in (("top_k", 7), ("top_k", 0), ("head_dim", -2), ("norm_eps", 0.0), ("rope_theta", math.nan)):
        with pytest.raises(UsageError, match=f" {value} "):
            dataclasses.replace(MOE, **{name: value}).check()
