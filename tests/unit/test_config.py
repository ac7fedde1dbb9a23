"""Presets, Hugging Face's configurations, exact counts, and every refusal in one clear line."""

import dataclasses
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

from common.config import TrainConfig, spelled
from common.counts import count_flops, count_parameters
from common.errors import UsageError
from common.launching.command_line import OneLineParser, parse
from common.link import Link
from common.model import Decoder
from common.model_config import ModelConfig
from common.presets import PRESETS, resolve
from step01_single_gpu.experiments.tools import OneProcess
from tests.harness.observing import configure
from tests.harness.ranks import run_command

TOTALS = {  # as published in the model cards, or summed over the tensors of the published checkpoints
    **{"smollm-135m": 134_515_008, "smollm-360m": 361_821_120, "smollm-1.7b": 1_711_376_384},
    **{"llama3-1b": 1_235_814_400, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496},
    **{"llama3-405b": 405_853_388_800, "mixtral-8x7b": 46_702_792_704},
}
MOE = ModelConfig(*(100, 16, 3, 4, 2, 40, False), experts=6, top_k=2, shared_experts=1, dense_layers=1, expert_ffn=12)


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
    count, expert = count_parameters(MOE), 3 * 16 * 12
    assert count.moe == 7 * expert + 16 * 6 and count.moe_active == 3 * expert + 16 * 6
    assert count.total - count.active == 2 * 4 * expert  # two layers, four experts that are not chosen
    active = 3 * 2 * (16 * 16 + 16 * 8) + 3 * 16 * 40 + 2 * count.moe_active
    assert count_flops(MOE, 10).linear == 2 * 10 * active


def test_layers_of_experts():
    assert list(MOE.expert_layers) == [1, 2] and [MOE.has_experts(index) for index in range(3)] == [False, True, True]
    dense = dataclasses.replace(MOE, experts=0)
    assert not dense.expert_layers and not any(map(dense.has_experts, range(3)))


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_flops_are_those_counted(mode):
    """Recomputation included. torch's counter sees the products of the naive core, and not the CPU's flash kernel."""
    config = TrainConfig(seq_len=17, attention="naive", recompute=mode, micro_batch=3, global_batch=3)
    config.model_config = ModelConfig(256, 32, 3, 4, 1, 40, True, head_dim=6)
    run = OneProcess(config)
    with FlopCounterMode(display=False) as counter:
        run.gradients()
    assert counter.get_total_flops() == 3 * count_flops(config.model_config, 17).hardware(mode)


def valid(flags: str, step: int = 6, world: int = 1) -> TrainConfig:
    return configure(step, flags, world)


def test_what_flags_make_of_the_model(tmp_path):
    assert valid("--layers 2 --hidden 96 --heads 6").model_config.kv_heads == 2  # of the preset's 4, what divides 6
    for preset, tied in (("debug", False), ("smollm-135m", True)):
        for flag, expected in (("", tied), ("--tie-embeddings", True), ("--no-tie-embeddings", False)):
            assert valid(f"--model {preset} {flag}").model_config.tie_embeddings is expected
    values = {"model_type": "llama", "vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 1}
    values |= {"num_attention_heads": 2, "intermediate_size": 48, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert valid(f"--model {tmp_path}").model_config.head_width == 8
    assert valid(f"--model {tmp_path}/config.json --hidden 64").model_config.head_width == 32  # 64 / 2


def test_heavy_packages_are_imported_only_where_they_are_used(tmp_path):
    """Sixteen ranks would each spend seconds on them; neither a preset nor a whole run needs them."""
    heavy = {"transformers", "datasets", "matplotlib", "torch.distributed.checkpoint", "pandas", "pyarrow"}
    heavy |= {"torch._dynamo", "torch._inductor", "sympy"}  # torch's compiler, half of a start: its optimizers' methods
    flags = "--layers 1 --hidden 32 --heads 2 --kv-heads 2 --ffn 32 --seq-len 8 --vocab 384 --global-batch 2 --steps 1"
    arguments = f"{flags} --data synthetic --device cpu --run-dir {tmp_path / 'run'}".split()
    code = "import sys, common.config, step08_5d.train\ncommon.config.TrainConfig(model='llama3-8b').model_config"
    code += f"\nprint({heavy} & sys.modules.keys())\nsys.argv[1:] = {arguments}"
    code += "\nstep08_5d.train.run(8, step08_5d.train.train, step08_5d.train.check)"
    code += f"\nprint({heavy} & sys.modules.keys())"
    printed = run_command([sys.executable, "-c", code]).stdout.splitlines()
    assert "loss" in "".join(printed)
    assert [line for line in printed if line.startswith(("set", "{"))] == ["set()", "set()"], printed


def test_paths_may_begin_with_the_home(tmp_path, monkeypatch):
    """A shell leaves `--run-dir=~/x` to the program. All commands have this parser."""
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = ("run_dir", "resume", "model", "init_from", "data", "tokenizer", "schedule_file")
    config = parse(8, [f"{spelled(flag)}=~/{flag}" for flag in flags])
    assert [getattr(config, flag) for flag in flags] == [f"{tmp_path}/{flag}" for flag in flags]
    assert parse(1, ["--data", "some/~set"]).data == "some/~set"
    command = OneLineParser()
    command.add_argument("--prompt", type="text")
    assert command.parse_args(["--prompt", "~/x"]).prompt == "~/x"
    below = command.add_subparsers().add_parser("sub")
    below.add_argument("several", nargs="+")
    below.add_argument("--home", type=Path)
    below.add_argument("--out", default="~/out")
    found = command.parse_args(["sub", "~/a", "b~", "--home", "~"])
    assert (found.several, found.home, found.out) == ([f"{tmp_path}/a", "b~"], tmp_path, f"{tmp_path}/out")


def test_links_and_the_single_process():
    assert valid("--link 50,1.5").link_model == Link(alpha=pytest.approx(50e-6), bandwidth=1.5e9)
    with pytest.raises(UsageError, match="step01_single_gpu .* 2"):
        valid("", step=1, world=2)


@pytest.mark.parametrize("name", ["seed", "steps", "warmup", "keep"])
def test_whole_numbers_that_pytorch_cannot_hold(name):
    assert getattr(valid(f"--{name} {2**63 - 1} --save-every 1 --run-dir x"), name) == 2**63 - 1
    for number in (2**63, 10**400):  # which no float holds either
        with pytest.raises(UsageError, match=f"^--{name} [0-9,]+ must be below 2.63$"):
            valid(f"--{name} {number} --save-every 1 --run-dir x")


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


SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
SCALING |= {"original_max_position_embeddings": 8192}
SIZES = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32}
SIZES |= {"num_attention_heads": 32, "intermediate_size": 14336}
LLAMA_31_8B = SIZES | {"num_key_value_heads": 8, "rms_norm_eps": 1e-05, "max_position_embeddings": 131072}
LLAMA_31_8B |= {"rope_theta": 500000.0, "rope_scaling": SCALING}  # as published


def resolved(folder, values: dict) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    assert resolve(str(folder)) == resolve(str(folder / "config.json"))
    return replace(resolve(str(folder)), head_dim=None)


def test_files_of_all_ages(tmp_path):
    assert resolved(tmp_path, LLAMA_31_8B) == PRESETS["llama3-8b"]
    new = {key: value for key, value in LLAMA_31_8B.items() if not key.startswith("rope")}
    new["rope_parameters"] = SCALING | {"rope_theta": 500000.0}
    assert resolved(tmp_path, new) == PRESETS["llama3-8b"]
    llama_1 = ModelConfig(128256, 4096, 32, 32, 32, 14336, False, norm_eps=1e-6, max_positions=2048)
    assert resolved(tmp_path, SIZES) == llama_1, "no K/V heads, no RoPE entries, no tying"
    mixtral = {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_key_value_heads": 8}
    mixtral |= {"rope_theta": 1e6, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5}
    assert resolved(tmp_path, SIZES | mixtral) == PRESETS["mixtral-8x7b"]


BIASED = {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}
NOT_LLAMA = [  # what is wrong in a file, and what the line says
    ({"model_type": "gpt2"}, "has model_type gpt2, which this decoder does not have"),
    ({"model_type": "mistral"}, "has sliding_window 4096, which"),  # transformers' default
    *((each, f"has {name} {each[name]}, which") for each in BIASED for name in each),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "has rope_parameters {'type': 'linear'"),
    ({"rope_scaling": SCALING | {"low_freq_factor": 4}}, "has rope_parameters {'factor': 8.0"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "cannot be read ("),
    ({"hidden_size": "32"}, "needs a whole number above 0 for hidden_size, which is 32"),
    ({"hidden_size": 0}, "needs a whole number above 0 for hidden_size, which is 0"),
    ({"num_key_value_heads": 5}, "--kv-heads 5 does not divide --heads 32"),
    ({"num_attention_heads": None}, ""),
    ({"tie_word_embeddings": "no"}, ""),  # transformers 5.0 leaves it to us
]


def test_files_that_are_refused(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    names = [
        (name, "is no preset (debug, smollm-135m, ")
        for name in ("llama9", "./missing", "a/b.json", "a/b/c", "", "x" * 5000)
    ]
    names += [
        ("owner/no-such-model-1.7B", "which is no file or folder here, cannot be read ("),
        (str(tmp_path / "bad.json"), "cannot be read ("),
    ]
    for number, (values, words) in enumerate(NOT_LLAMA):
        (tmp_path / str(number)).mkdir()
        (tmp_path / f"{number}/config.json").write_text(json.dumps(LLAMA_31_8B | values))
        names.append((str(tmp_path / str(number)), words))
    for key in SIZES.keys() - {"model_type"}:  # transformers would take that of another model
        values = {name: value for name, value in LLAMA_31_8B.items() if name != key}
        (tmp_path / f"without {key}.json").write_text(json.dumps(values | {f"{key}s": 64}))
        names.append((str(tmp_path / f"without {key}.json"), f"needs a whole number above 0 for {key}, which is mis"))
    for name, words in names:
        with pytest.raises(UsageError) as caught:
            resolve(name)
        line = str(caught.value)
        assert re.match(f"--model {re.escape(name)}[ ,:]+{re.escape(words)}", line) and "\n" not in line
