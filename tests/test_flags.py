"""Every flag of every step has an effect: train.py with the flag differs from train.py without it.

What may differ is whatever an observer of a run can see: numbers, saved activations, collectives, files, the record, or
that the combination is refused. A flag that a step accepts and ignores leaves all of it as it was.
"""

import contextlib
import importlib
import io
import json
import math
import os
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from common import collectives
from common.checkpoints import checkpoint
from common.command_line import STEP_NAMES, parse
from common.config import TrainConfig
from common.errors import UsageError
from common.process_groups import Degrees, build_mesh
from common.start import environment
from common.weights import initialisation
from step01_single_gpu.mixed_precision import LossScaler
from tests.harness.ranks import ROOT, run_ranks

BASE = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 384 --seq-len 16 --data synthetic --device cpu"
BASE += " --global-batch 8 --micro-batch 2 --steps 2 --warmup 2 --dtype float64 --no-tie-embeddings"
STEPS = range(1, len(list(ROOT.glob("step*/train.py"))) + 1)
TP, PP, CP, ZERO = "--tp 2", "--pp 2", "--cp 2", "--zero 2"
MOE = "--experts 4"
# flag: (what a run without it is given besides BASE, the flag). `{folder}` is the run's own folder.
CHANGES = {
    "model": ("", "--model llama3-1b"),
    "layers": ("", "--layers 3"),
    "hidden": ("", "--hidden 64"),
    "heads": ("", "--heads 2"),
    "kv_heads": ("", "--kv-heads 1"),
    "ffn": ("", "--ffn 64"),
    "vocab": ("", "--vocab 400"),
    "tie_embeddings": ("", "--tie-embeddings"),
    "init_from": ("", "--init-from {folder}"),
    "seq_len": ("", "--seq-len 8"),
    "micro_batch": ("", "--micro-batch 1"),
    "global_batch": ("", "--global-batch 4"),
    "steps": ("", "--steps 1"),
    "optimizer": ("", "--optimizer sgd"),
    "lr": ("", "--lr 0.01"),
    "warmup": ("", "--warmup 5"),
    "weight_decay": ("", "--weight-decay 0.9"),
    "clip": ("", "--clip 0.01"),
    "seed": ("", "--seed 1"),
    "dtype": ("", "--dtype float32"),
    "attention": ("", "--attention naive"),
    "recompute": ("", "--recompute full"),
    "data": ("", f"--data {ROOT / 'README.md'}"),
    "tokenizer": ("", "--tokenizer some/name"),  # refused: synthetic data has no text
    "run_dir": ("", "--run-dir {folder}"),
    "save_every": ("--run-dir {folder}", "--save-every 1"),
    "keep": ("--run-dir {folder} --save-every 1", "--keep 1"),
    "async_save": ("--run-dir {folder} --save-every 1", "--async-save"),
    "resume": ("--run-dir {folder}", "--resume {folder}/nowhere"),  # refused: there is no checkpoint
    "trace": ("--run-dir {folder}", "--trace 1:1"),
    "profile": ("--run-dir {folder} --trace 1:1", "--profile"),
    "measure_memory": ("--run-dir {folder}", "--measure-memory"),
    "peak_tflops": ("--run-dir {folder}", "--peak-tflops 7"),
    "link": ("", "--link 30000,1"),
    "dp": ("", "--dp 7"),  # refused: not the number of ranks
    "dp_mode": ("", "--dp-mode naive"),
    "bucket_mb": ("", "--bucket-mb 0.01"),
    "zero": ("", "--zero 3"),
    "zero_replicas": (ZERO, "--zero-replicas 2"),
    "zero_reduce": (ZERO, "--zero-reduce step"),
    "tp": ("", TP),
    "sequence_parallel": (TP, "--no-sequence-parallel"),
    "tp_mode": (TP, "--tp-mode plain"),
    "pp": ("", PP),
    "schedule": (PP, "--schedule afab"),
    "virtual_stages": (f"{PP} --layers 6 --schedule interleaved", "--virtual-stages 3"),
    "schedule_file": (PP, f"--schedule-file {next(ROOT.glob('step05*/**/*.csv'))}"),
    "consecutive": (f"{PP} --layers 4 --schedule llama3", "--consecutive 4"),
    "layer_delay": (PP, "--layer-delay 20"),
    "cp": ("", CP),
    "cp_mode": (CP, "--cp-mode allgather"),
    "cp_split": (CP, "--cp-split contiguous"),
    "mask_documents": ("--seq-len 20", "--mask-documents"),
    "experts": ("", MOE),
    "top_k": (MOE, "--top-k 3"),
    "shared_experts": (MOE, "--shared-experts 1"),
    "dense_layers": (MOE, "--dense-layers 1"),
    "expert_ffn": (MOE, "--expert-ffn 24"),
    "gate": (MOE, "--gate sigmoid"),
    "expert_groups": (MOE, "--expert-groups 2"),
    "node_limit": (f"{MOE} --expert-groups 2", "--node-limit 2"),
    "balance": (MOE, "--balance none"),
    "aux_coef": (MOE, "--aux-coef 0.5"),
    "bias_rate": (f"{MOE} --balance bias", "--bias-rate 0.5"),
    "z_coef": (MOE, "--z-coef 0.1"),
    "capacity_factor": (MOE, "--capacity-factor 0.5"),
    "ep": (MOE, "--ep 2"),
    "fused": ("", "--no-fused"),
    "compile": ("", "--compile"),
    "shapes": ("", "--shapes"),
}
# Carried out before train() is called; tests/test_faults.py and tests/unit/test_process_groups.py see their effect.
# (And two ranks divide in one dimension only, which needs no order.)
AT_THE_START = {"device", "timeout", "memory_snapshot", "order"}
PEERLESS = {"link"}  # in one process there is nobody to talk to


def flags_of(step: int) -> dict[str, int]:
    """The flags that a step knows, and the step that introduces each; without those that are carried out before."""
    fields = TrainConfig.__dataclass_fields__
    since = {name: fields[name].metadata["step"] for name in vars(parse(step, [])) if fields[name].metadata}
    return {name: first for name, first in since.items() if first <= step and name not in AT_THE_START}


def constant_weights(path: str, config) -> initialisation.InitialValues:
    """Stands in for a Hugging Face checkpoint: all weights are 0.01."""

    def fill(tensors):
        for tensor in tensors:
            tensor.data.fill_(0.01)

    return fill


def observe(step: int, flags: str, folder: Path) -> dict:
    """What can be seen of a run on this rank. A refusal is seen as such."""
    train = importlib.import_module(f"{STEP_NAMES[step - 1]}.train").train
    saved, in_background, save, slept, sleep = [], [], checkpoint.save, [], time.sleep
    compiled, printed = [], io.StringIO()

    def noted_compile(function, **options):
        compiled.append(function.__name__)
        return function

    def noted_sleep(seconds):  # of --link and --layer-delay
        slept.append(seconds)
        sleep(seconds)

    def noted_save(*args, **options):
        in_background.append(threading.current_thread() is not threading.main_thread())
        return save(*args, **options)

    def pack(tensor):
        saved.append(tensor.numel() * tensor.element_size())
        return tensor

    # Under these hooks autograd hands out other tensor objects, by which a split backward does not know its weights
    saved_tensors = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    if "--schedule-file" in flags:
        saved_tensors = contextlib.nullcontext()
    try:
        config = parse(step, f"{BASE} {flags}".format(folder=folder).split())
        config.resolve_and_check(environment().world_size)
        mesh = build_mesh(Degrees.of(config), torch.device("cpu"), config.model_config.kv_heads)
        with (
            mock.patch.object(time, "sleep", noted_sleep),
            mock.patch.object(initialisation, "stored_values", constant_weights),
            mock.patch.object(checkpoint, "save", noted_save),
            mock.patch.object(torch, "compile", noted_compile),
            contextlib.redirect_stdout(printed),
            collectives.record() as calls,
            saved_tensors,
        ):
            parameters = train(config, mesh)
    except UsageError:
        return {"refused": True}
    return {
        "refused": False,
        "parameters": [(tuple(each.shape), each.detach().double().abs().sum().item()) for each in parameters],
        "saved": sum(saved),
        "calls": [(call.op, call.group, call.phase, call.bytes, call.peer) for call in calls],
        "saved in the background": in_background,
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else [],
        "record": recorded(folder),
        "waits": sum(slept) > 0,
        "compiled": compiled,
        "lines": len(printed.getvalue().splitlines()),
    }


def recorded(folder: Path) -> list:
    """What the record says besides times and the flags themselves."""
    found = []
    if (folder / "metrics.jsonl").exists():
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            values = json.loads(line)
            found.append((values["step"], values["loss"], values["grad_norm"], values["peak_memory_bytes"] is None))
        found.append(json.loads((folder / "config.json").read_text())["peak_source"])
    return found


def observe_all(step: int, runs: list[str], folder: Path) -> dict[str, dict]:
    return {flags: observe(step, flags, folder / str(index)) for index, flags in enumerate(runs)}


@pytest.mark.parametrize("step", STEPS)
def test_every_flag_has_an_effect(step, tmp_path):
    names = flags_of(step)
    assert set(names) <= CHANGES.keys(), "a new flag needs a line in CHANGES"
    if step not in (STEPS[0], STEPS[-1]) and not os.environ.get("TEST_ALL"):
        names = [name for name, first in names.items() if 1 < first >= step - 1]  # what is rather new
    pairs = {name: (CHANGES[name][0], " ".join(CHANGES[name]).strip()) for name in names}
    runs = list(dict.fromkeys(flags for pair in pairs.values() for flags in pair)) + ["--seed 0"]
    world = 1 if step == 1 else 2
    seen = run_ranks(world, observe_all, step, runs, tmp_path, timeout=600)
    assert seen[0]["--seed 0"] == seen[0][""], f"step {step}: the default of a flag makes a difference"
    for name, (without, flags) in pairs.items():
        if step == 1 and name in PEERLESS:
            continue
        before, after = seen[0][without], seen[0][flags]
        assert not before["refused"], f"step {step}: {without} does not run"
        assert after != before, f"step {step}: --{name.replace('_', '-')} changes nothing"


def norms_from_too_large_a_scale(step: int, folder: Path) -> list[float]:
    """Gradient norms of a float16 run whose loss scale is so large at first that gradients overflow."""
    real = LossScaler.__init__

    def too_large(self, *args):
        real(self, *args)
        self.scale = 2.0**26

    with mock.patch.object(LossScaler, "__init__", too_large):
        assert not observe(step, f"--dtype float16 --optimizer sgd --steps 14 --run-dir {folder}", folder)["refused"]
    return [line[2] for line in recorded(folder)[:-1]]


@pytest.mark.parametrize("step", STEPS)
def test_float16_scales_the_loss_and_skips_steps(step, tmp_path):
    norms = run_ranks(1 if step == 1 else 2, norms_from_too_large_a_scale, step, tmp_path)[0]
    assert not math.isfinite(norms[0]), "the loss was not scaled"
    assert 0.1 < norms[-1] < 10, "a step that overflowed was taken, or the norm or the update was not scaled back"
