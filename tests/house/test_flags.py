"""Every flag of every step has an effect, and the right one: train.py with the flag against train.py without it.

A flag of the model, the data or the update changes the numbers. One of the layout or of logging leaves them as they
are, and changes what `CHANGES` says of the run: what is sent, computed, kept or written.

A flag is tried in the step that brings it and in the last step, with TEST_ALL=1 in all between them, too. Besides, each
step without its own flags is compared with the step before it.
"""

import functools
import math
import re
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from common.config import TrainConfig
from common.launching.command_line import parse
from step01_single_gpu.mixed_precision import LossScaler
from tests.harness.ranks import ROOT, run_ranks
from tests.parity.cases import ALL
from tests.parity.runs import assemble
from tests.parity.whole_run import observe, observe_all, what_changed

STEPS = range(1, len(list(ROOT.glob("step*/train.py"))) + 1)
TP, PP, CP, ZERO, MOE, RUN = "--tp 2", "--pp 2", "--cp 2", "--zero 2", "--experts 4", "--run-dir {folder}"
STAGES = f"{PP} --layers 4 --schedule interleaved"  # two of them on every rank
BALANCED = f"{MOE} --balance bias"
# (what is given besides BASE, what the flags change): flags. `{folder}` is the run's own folder
TABLE = {
    ("", "numbers"): """--model llama3-1b; --layers 3; --hidden 64; --heads 2; --kv-heads 1; --ffn 64;
        --latent 0,16,8,4,12 --kv-heads 4; --vocab 400; --tie-embeddings; --init-from {folder}; --seq-len 8;
        --global-batch 4; --optimizer sgd; --lr 0.01; --warmup 5; --weight-decay 0.9; --clip 0.01; --seed 1;
        --dtype float16; --data ROOT/README.md; --experts 4; --fp8 tile; --moments bfloat16""",
    ("--fp8 tensor", "numbers"): "--fp8-gradients e5m2",
    (f"--fp8 tile {MOE}", "numbers"): "--fp8-dispatch",
    ("--fp8 tile --zero 3", "calls"): "--fp8-gather",
    (MOE, "numbers"): """--top-k 3; --shared-experts 1; --dense-layers 1; --expert-ffn 24; --gate sigmoid;
        --expert-groups 2 --node-limit 1; --balance none; --aux-coef 0.5; --z-coef 0.1; --capacity-factor 0.5""",
    (f"{MOE} --expert-groups 2 --node-limit 2", "numbers"): "--node-limit 1",
    (BALANCED, "numbers"): "--bias-rate 0.5",
    ("--seq-len 20", "numbers"): "--mask-documents",
    ("", "batches"): "--micro-batch 1; --steps 1",
    ("", "saved"): "--attention naive; --fused",
    ("", "recomputed"): "--recompute full",
    ("", "compiled"): "--compile",
    ("", "delayed"): "--link 30000,1",
    ("", "sleeps"): "--compute 0.001",
    ("", "printed"): "--shapes",
    # Synthetic data has no text; it is not the number of ranks; there is no GPU, and no folder
    ("", "refused"): "--tokenizer some/name; --dp 7; --own-attention; --log-to wandb",
    (RUN, "refused"): "--resume {folder}/nowhere",  # there is no checkpoint
    ("", "files"): "--run-dir {folder}",
    (RUN, "files"): "--save-every 1",
    (f"{RUN} --save-every 1", "files"): "--keep 1",
    (f"{RUN} --save-every 1", "in background"): "--async-save",
    (RUN, "traced"): "--trace 1:1",
    (f"{RUN} --trace 1:1", "files"): "--profile",
    (RUN, "record"): "--measure-memory; --peak-tflops 7",
    ("", "calls"): "--dp-mode naive; --bucket-mb 0.01; --zero 3; --tp 2; --pp 2; --cp 2",
    (ZERO, "calls"): "--zero-replicas 2; --zero-reduce step",
    (TP, "calls"): "--no-sequence-parallel; --tp-mode plain",
    (PP, "calls"): f"--schedule afab; --schedule-file {next(ROOT.glob('step05*/**/*.csv'))}",
    (f"{PP} --layers 6 --schedule interleaved", "calls"): "--virtual-stages 3",
    (f"{PP} --layers 4 --schedule llama3", "calls"): "--consecutive 4",
    (PP, "sleeps"): "--layer-delay 20",
    (CP, "calls"): "--cp-mode allgather; --cp-split contiguous",
    (MOE, "calls"): "--ep 2",
}
CHANGES = {}  # flag: (what a run without it is given, the flag, what it changes)
for (given, changed), flags in TABLE.items():
    for flag in re.split(r";\s*", flags.replace("ROOT", str(ROOT))):
        name = flag.split()[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        CHANGES[name] = given, flag, changed
# The same flags, in these steps and later ones, in further layouts, where they may change something else
FURTHER = [
    (5, "recompute", STAGES),
    (5, "init_from", f"{PP} --schedule dualpipe --tie-embeddings"),
    (6, "attention", CP, "scores"),
    (5, "zero", PP, "freed"),
    (7, "init_from", f"{MOE} {STAGES}"),
    (7, "dtype", f"{MOE} --aux-coef 5"),
    (7, "link", f"{MOE} {PP} --micro-batch 4"),
    (7, "compute", f"{MOE} --schedule dualpipev --ep 2"),
    (7, "ep", f"{MOE} --schedule dualpipev", "turns"),
    (7, "tp", MOE),
]
# Carried out before train() is called; test_faults.py and unit/test_process_groups.py see their effect.
# (And two ranks divide in one dimension only, which needs no order.)
AT_THE_START = {"device", "timeout", "memory_snapshot", "order"}
PEERLESS = {"link"}  # in one process there is nobody to talk to
SINCE = {name: field.metadata.get("step") for name, field in TrainConfig.__dataclass_fields__.items()}
SINCE |= dict.fromkeys(PEERLESS, 2)


def flags_of(step: int) -> dict[str, str]:
    """The flags that a step knows, and the role of each; without those that are carried out before."""
    fields = TrainConfig.__dataclass_fields__
    known = {name: fields[name].metadata for name in vars(parse(step, [])) if fields[name].metadata}
    without = AT_THE_START | (PEERLESS if step == 1 else set())
    return {name: each["role"] for name, each in known.items() if each["step"] <= step and name not in without}


def check(name: str, flags: str, role: str, what: str, before: list[dict], after: list[dict]) -> None:
    """Raises AssertionError if a flag does not do what it is for."""
    assert not before[0]["refused"], "the run without it is refused"
    changed = what_changed(before, after, 1e-300 if role == "logging" else 1e-10)
    assert what in changed, f"{what} ought to change, and not {changed}"
    assert role not in ("layout", "logging") or "numbers" not in changed or name == "steps", "the numbers change"
    for old, new in zip(before, after, strict=True):
        batches = len(new["batches"])
        if name == "attention" and what == "saved":
            assert new["saved"] > old["saved"], "the scores are not kept"
        elif name == "recompute":
            assert new["saved"] < old["saved"], "what is computed again is kept nevertheless"
        elif name == "dtype":
            assert np.allclose(new["curve"], old["curve"], rtol=1e-2, atol=0), "a loss is not scaled as the others are"
        elif name == "link":
            assert not any(old["delayed"]) and all(new["delayed"]), "some collectives do not wait for the link"
        elif name == "init_from":
            assert new["filled"] == new["names"], f"not read: {new['names'] ^ new['filled']}"
        elif name == "layer_delay":
            assert new["sleeps"] == 2 * batches, "not every forward and every backward takes its time"
        elif name == "compute":  # at least q, k, v, o, gate, up and down of a layer, and twice as many backward
            assert new["sleeps"] >= 3 * 7 * batches, "some products take no time"
            # 1e6 FLOP/s, and a product of 32 tokens with 32 x 32 weights has 65,536 FLOPs
            assert 0.02 < new["slept"] / new["sleeps"] < 0.5, "a product takes another time than its FLOPs"
        elif name == "async_save":
            assert not any(old["in background"]) and all(new["in background"])
            assert new["files"] == old["files"], "the run ends before its checkpoints are complete"
        elif name == "zero":  # frees each layer and each end of the model at first, and in two updates
            freed = 3 * 2 * (1 if PP in flags else 2)
            assert (new["freed"] == freed) == (PP in flags), "in a pipeline weights stay gathered between micro-batches"
    if name == "recompute":
        layers = {name for rank in after for name, *_ in rank["boxes"] if name.endswith("attention.q_proj.weight")}
        assert sum(rank["recomputed"] for rank in after) == 8 * len(layers), "not every layer is computed again"


def is_tried(step: int, since: int) -> bool:
    """Whether a step tries what another one, `since`, has brought."""
    return ALL or step in (since, STEPS[-1])


def cases_of(step: int) -> list[tuple]:
    """(flag, flags without it, flags with it, what it changes) of everything that a step tries."""
    cases = [(name, *CHANGES[name]) for name in flags_of(step) if is_tried(step, SINCE[name])]
    for since, name, without, *what in FURTHER:
        if step >= since and is_tried(step, since):
            _, flag, usual = CHANGES[name]
            cases.append((name, without, flag, *(what or [usual])))
    return [(name, without, f"{without} {flag}".strip(), what) for name, without, flag, what in cases]


@functools.cache
def runs_of(step: int) -> dict[str, list[dict]]:
    """What every rank has seen of all runs of a step, by their flags."""
    runs = list(dict.fromkeys(flags for _, *two, _ in cases_of(step) for flags in two)) + ["--seed 0"]
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(1 if step == 1 else 2, observe_all, step, runs, Path(folder), timeout=600)
    return {flags: [rank[flags] for rank in ranks] for flags in runs}


@pytest.mark.parametrize("step", STEPS)
def test_every_flag_does_what_it_is_for(step):
    roles, runs = flags_of(step), runs_of(step)
    assert set(roles) <= CHANGES.keys(), "a new flag needs a line in CHANGES"
    assert not what_changed(runs[""], runs["--seed 0"], 1e-300), f"step {step}: the default of a flag is not neutral"
    for name, without, flags, what in cases_of(step):
        try:
            check(name, flags, roles[name], what, runs[without], runs[flags])
        except AssertionError as error:
            raise AssertionError(f"step {step}, {flags} (--{name.replace('_', '-')}): {error}") from error


OTHERWISE = {4: {"saved"}}  # what a step does in its own way: step 4 has another loss
LAUNCHED_OTHERWISE = 5, "--dp-mode naive"


def earlier_with(flags: str, step: int) -> int | None:
    """The nearest earlier step that has this run, and accepts it."""
    for earlier in range(step - 1, 0, -1):
        if flags in (runs := runs_of(earlier)):
            return None if runs[flags][0]["refused"] else earlier


@pytest.mark.parametrize("step", STEPS[1:])
def test_without_its_own_flags_a_step_does_what_the_previous_one_does(step):
    """All that can be seen is the same; next to step 1, which is one process, the numbers are."""
    for flags, run in runs_of(step).items():
        earlier = earlier_with(flags, step)
        if earlier is None or (flags == LAUNCHED_OTHERWISE[1] and earlier < LAUNCHED_OTHERWISE[0] <= step):
            continue
        otherwise = set().union(*(OTHERWISE.get(each, set()) for each in range(earlier + 1, step + 1)))
        changed = what_changed(runs_of(earlier)[flags], run, 1e-2 if "float16" in flags else 1e-10)
        assert changed <= otherwise, f"step {step}, {flags}: {changed} differ from step {earlier}"


def float16_from_too_large_a_scale(step: int, folder: Path) -> list[dict]:
    """Float16 runs whose gradients overflow at first: 14 steps, 2 more, and the first alone."""
    real = LossScaler.__init__

    def too_large(self, *args):
        real(self, *args)
        self.scale = 2.0**26

    flags = "--dtype float16 --optimizer sgd" + f" {MOE} --balance bias" * (step >= 7)
    saving = f"{flags} --run-dir {folder} --save-every 14 --steps"
    runs = f"{saving} 14", f"{saving} 16 --resume auto", f"{flags} --steps 1"
    with mock.patch.object(LossScaler, "__init__", too_large):
        return [observe(step, each, folder) for each in runs]


@pytest.mark.parametrize("step", STEPS if ALL else (1, 2, 3, STEPS[-1]))  # where gradients are added up in a new way
def test_float16_scales_the_loss_skips_steps_and_goes_on(step, tmp_path):
    ranks = run_ranks(1 if step == 1 else 2, float16_from_too_large_a_scale, step, tmp_path)
    many, _, one = map(assemble, zip(*ranks, strict=True))
    assert not math.isfinite(many.norms[0]), "the loss was not scaled"
    assert 0.1 < many.norms[-1] < 10, "a step that overflowed was taken, or the norm or the update was not scaled back"
    [saved], [resumed] = (run["extra"] for run in ranks[0][:2])
    taken = sum(map(math.isfinite, many.norms))
    assert (saved["updates"], saved["loss_scale"]) == (taken, 2.0 ** (26 - 14 + taken)), "steps or scale miscounted"
    assert (resumed["updates"], resumed["loss_scale"]) == (taken + 2, saved["loss_scale"]), "not gone on from there"
    for name, value in one.parameters.items():
        assert np.isfinite(value).all(), f"{name} was updated in a step that overflowed"
        if name.endswith("bias"):
            assert not value.any() and many.parameters[name].any(), f"{name} moved in a step that overflowed"
