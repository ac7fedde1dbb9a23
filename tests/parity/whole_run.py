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
from common.launching.command_line import STEP_NAMES
from common.launching.run_mesh import mesh_of
from common.start import environment
from common.tracing.chrome_trace import read_trace
from step01_single_gpu import initial_weights
from step01_single_gpu.data.batches import Batches
from step01_single_gpu.recompute import _Recompute
from step01_single_gpu.running.run_record import RunRecord
from step03_zero.unit import Unit
from step06_context_parallel import attention_block
from step07_expert_parallel import overlap
from tests.harness.observing import configure, watching
from tests.harness.ranks import steps_of
from tests.parity.runs import assemble, assert_parity, boxes_of

BASE = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 384 --seq-len 16 --data synthetic --device cpu"
BASE += " --global-batch 8 --micro-batch 2 --steps 2 --warmup 2 --dtype float64 --no-tie-embeddings --peak-tflops 1"


def observe(step: int, flags: str, folder: Path) -> dict:
    """What can be seen of a run on this rank: numbers as `assemble` takes them, and what may change besides."""
    train = importlib.import_module(f"{STEP_NAMES[step - 1]}.train").train
    lists = "refused", "in background", "sleeps", "compiled", "delayed", "batches", "extra", "curve", "rates"
    seen = {name: [] for name in lists} | {"filled": set()}
    seen |= dict.fromkeys(("recomputed", "saved", "scores", "freed", "turns"), 0)
    sleep, names = time.sleep, {"replica": "dp_cp"}  # without --zero all ranks are replicas
    stack, printed = contextlib.ExitStack(), io.StringIO()

    def count(what: str):
        return lambda *_, **__: seen.update({what: seen[what] + 1})

    def constant_weights(path: str, config) -> initial_weights.InitialValues:
        """Stands in for a Hugging Face checkpoint: all weights are 0.01."""

        def fill(tensors):
            for tensor in tensors:
                seen["filled"].add(tensor.spec.name)
                tensor.data.fill_(0.01)

        return fill

    def note_save(*args, **options):
        seen["in background"].append(threading.current_thread() is not threading.main_thread())
        sleep(0.05 * seen["in background"][-1])  # so that it is not over by chance
        seen["extra"].append(args[3])

    def noted_sleep(seconds):
        if sys._getframe(1).f_globals["__name__"].startswith(("common", "step")):  # of --link and --layer-delay
            seen["sleeps"].append(seconds)
        else:  # somebody waits for a lock on a file
            sleep(seconds)

    def note_end_of_step(self, step, seconds, measured):
        seen["curve"].append((measured["loss"], measured["grad_norm"]))
        seen["rates"].append(measured["lr"])

    def pack(tensor):
        if collectives.phase == "forward":  # recomputed ones are kept in the backward
            seen["saved"] += tensor.numel() * tensor.element_size()
        return tensor

    try:
        base = f"{BASE} --no-fused" if step == 8 else BASE  # so that it can be compared with step 7
        config = configure(step, f"{base} {flags}".format(folder=folder))
        mesh = mesh_of(config, torch.device("cpu"))
        with stack:
            compiled = mock.patch.object(torch, "compile", lambda each, **_: seen["compiled"].append(each) or each)
            for context in (
                watching(checkpoint, "save", note_save),
                watching(Batches, "micro_batch", lambda self, *args, **_: seen["batches"].append(args[:3])),
                watching(RunRecord, "end_step", note_end_of_step),
                watching(_Recompute, "backward", count("recomputed")),
                watching(attention_block, "_scores", count("scores")),
                watching(Unit, "free", count("freed")),
                watching(overlap.Turns, "run", count("turns")),
                compiled,
                mock.patch.object(time, "sleep", noted_sleep),
                mock.patch.object(initial_weights, "stored_values", constant_weights),
                contextlib.redirect_stdout(printed),
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            ):
                stack.enter_context(context)
            delays = collectives.record(launched=lambda handle, calls, done_at: seen["delayed"].append(done_at > 0))
            calls = stack.enter_context(delays)
            updated = train(config, mesh)
        collectives.barrier(mesh.world)  # all files are there
    except UsageError:
        return seen | {"refused": True}
    return seen | {
        "boxes": boxes_of(updated),
        "names": {tensor.spec.name for tensor in updated},
        "sleeps": len(seen["sleeps"]),
        "slept": sum(seen["sleeps"]),
        "compiled": [function.__name__ for function in seen["compiled"]],
        "calls": [(call.op, names.get(call.group, call.group), call.phase, call.bytes, call.peer) for call in calls],
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else [],
        "record": recorded(folder),
        "traced": traced(folder),
        "printed": len(printed.getvalue().splitlines()),
    }


def recorded(folder: Path) -> list:
    """What the record says besides times and the flags themselves."""
    found = [(values["step"], values["peak_memory_bytes"] is None) for values in steps_of(folder)]
    if found:
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
        # Times differ anyway
        keys, pairs = before[0].keys() - {"boxes", "curve", "slept"}, list(zip(before, after, strict=True))
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
