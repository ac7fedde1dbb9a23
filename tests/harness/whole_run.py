"""Everything that can be seen of a run of a step's real train(): two runs are alike if all of it is."""

import contextlib
import importlib
import io
import json
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import torch

from common import collectives
from common.checkpoints import checkpoint
from common.errors import UsageError
from common.launching.command_line import STEP_NAMES, parse
from common.process_groups import mesh_of
from common.start import environment
from common.tracing.chrome_trace import read_trace
from step01_single_gpu import initial_weights
from step01_single_gpu.data.batches import Batches
from step01_single_gpu.recompute import _Recompute
from step01_single_gpu.recording.run_record import RunRecord
from step03_zero.unit import Unit
from step06_context_parallel import attention_block
from step07_expert_parallel import interleave
from tests.parity.runs import assemble, assert_parity, boxes_of

BASE = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 384 --seq-len 16 --data synthetic --device cpu"
BASE += " --global-batch 8 --micro-batch 2 --steps 2 --warmup 2 --dtype float64 --no-tie-embeddings --peak-tflops 1"


def observe(step: int, flags: str, folder: Path) -> dict:
    """What can be seen of a run on this rank: numbers as `assemble` takes them, and what may change besides."""
    train = importlib.import_module(f"{STEP_NAMES[step - 1]}.train").train
    seen = {name: [] for name in ("refused", "in background", "sleeps", "compiled", "delayed", "batches", "extra")}
    seen |= {
        "curve": [],
        "filled": set(),
        "recomputed": 0,
        "saved": 0,
        "scores": 0,
        "freed": 0,
        "turns": 0,
        "rates": [],
    }
    printed, save, end_step, batch = io.StringIO(), checkpoint.save, RunRecord.end_step, Batches.micro_batch
    sleep, names = time.sleep, {"replica": "dp_cp"}  # without --zero all ranks are replicas

    def constant_weights(path: str, config) -> initial_weights.InitialValues:
        """Stands in for a Hugging Face checkpoint: all weights are 0.01."""

        def fill(tensors):
            for tensor in tensors:
                seen["filled"].add(tensor.spec.name)
                tensor.data.fill_(0.01)

        return fill

    def noted_compile(function, **options):
        seen["compiled"].append(function.__name__)
        return function

    def noted_save(*args, **options):
        seen["in background"].append(threading.current_thread() is not threading.main_thread())
        sleep(0.05 * seen["in background"][-1])  # so that it is not over by chance
        seen["extra"].append(args[3])
        return save(*args, **options)

    def noted_sleep(seconds):
        if sys._getframe(1).f_globals["__name__"].startswith(("common", "step")):  # of --link and --layer-delay
            seen["sleeps"].append(seconds)
        else:  # somebody waits for a lock on a file
            sleep(seconds)

    def noted_batch(self, *args, **device):
        seen["batches"].append(args[:5])
        return batch(self, *args, **device)

    def noted_end_step(self, step, seconds, measured):
        seen["curve"].append((measured["loss"], measured["grad_norm"]))
        seen["rates"].append(measured["lr"])
        end_step(self, step, seconds, measured)

    def counted(name, real):
        def function(*args):
            seen[name] += 1
            return real(*args)

        return function

    def noted_launch(handle, calls, done_at):
        seen["delayed"].append(done_at > 0)

    def pack(tensor):
        if collectives.phase == "forward":  # recomputed ones are kept in the backward
            seen["saved"] += tensor.numel() * tensor.element_size()
        return tensor

    saved_tensors = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    try:
        base = f"{BASE} --no-fused" if step == 8 else BASE  # so that it can be compared with step 7
        config = parse(step, f"{base} {flags}".format(folder=folder).split())
        config.resolve_and_check(environment().world_size)
        mesh = mesh_of(config, torch.device("cpu"))
        with (
            mock.patch.object(time, "sleep", noted_sleep),
            mock.patch.object(initial_weights, "stored_values", constant_weights),
            mock.patch.object(checkpoint, "save", noted_save),
            mock.patch.object(torch, "compile", noted_compile),
            mock.patch.object(Batches, "micro_batch", noted_batch),
            mock.patch.object(RunRecord, "end_step", noted_end_step),
            mock.patch.object(_Recompute, "backward", counted("recomputed", _Recompute.backward)),
            mock.patch.object(attention_block, "_scores", counted("scores", attention_block._scores)),
            mock.patch.object(Unit, "free", counted("freed", Unit.free)),
            mock.patch.object(interleave.Turns, "run", counted("turns", interleave.Turns.run)),
            contextlib.redirect_stdout(printed),
            collectives.record(launched=noted_launch) as calls,
            saved_tensors,
        ):
            updated = train(config, mesh)
        collectives.barrier(mesh.world)  # all files are there
    except UsageError:
        return seen | {"refused": True}
    return seen | {
        "boxes": boxes_of(updated),
        "names": {tensor.spec.name for tensor in updated},
        "sleeps": len(seen["sleeps"]),
        "calls": [(call.op, names.get(call.group, call.group), call.phase, call.bytes, call.peer) for call in calls],
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else [],
        "record": recorded(folder),
        "traced": traced(folder),
        "printed": len(printed.getvalue().splitlines()),
    }


def recorded(folder: Path) -> list:
    """What the record says besides times and the flags themselves."""
    found = []
    if (folder / "metrics.jsonl").exists():
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            values = json.loads(line)
            found.append((values["step"], values["peak_memory_bytes"] is None))
        facts = json.loads((folder / "config.json").read_text())
        found.append((facts["peak_flops"], facts["peak_source"]))
    return found


def traced(folder: Path) -> set[str]:
    """The steps and phases in the trace, if there is one."""
    if not (folder / "trace.json").exists():
        return set()
    spans = read_trace(folder).spans[environment().rank]
    return {span["name"] for span in spans if span["cat"] in ("step", "phase")}


def observe_all(step: int, runs: list[str], folder: Path) -> dict[str, dict]:
    return {flags: observe(step, flags, folder / str(index)) for index, flags in enumerate(runs)}


def what_changed(before: list[dict], after: list[dict], tolerance: float = 1e-10) -> set[str]:
    """What differs between two runs, on some of their ranks; "numbers" if those of the training do."""
    if after[0]["refused"]:
        return {"refused"}
    changed = set()
    if len(before) == len(after):
        keys, pairs = before[0].keys() - {"boxes", "curve"}, list(zip(before, after, strict=True))
        changed = {key for key in keys if any(old[key] != new[key] for old, new in pairs)}
    whole, expected = assemble(after), assemble(before)
    shapes = [{name: value.shape for name, value in each.parameters.items()} for each in (whole, expected)]
    if shapes[0] != shapes[1] or len(whole.losses) != len(expected.losses):
        return changed | {"numbers"}
    try:
        assert_parity(whole, expected, "", tolerance)
    except AssertionError:
        changed.add("numbers")
    return changed
