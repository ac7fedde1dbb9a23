"""The record of a run that is divided: every number computed again from config.json, and by other means."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.config import flag_names
from common.counts import count_flops
from common.group import Group
from common.launching.run_mesh import degrees_of
from common.model import Decoder, naive_attention
from common.model_config import ModelConfig
from common.start import environment
from step01_single_gpu.running import run_record
from step01_single_gpu.running.run_record import RunRecord
from tests.harness.observing import configure, mesh_of, sent_so_far
from tests.harness.ranks import run_ranks, steps_of
from tests.parity.runs import ADAMW, SMALL, UNTIED, reference, train_here, training_of

STEPS, SEQUENCES, DELAY = 3, 4, 10  # DELAY: milliseconds that the forward of a layer takes at least, the backward twice
SHAPE = f"--layers 4 --hidden 64 --seq-len 64 --global-batch {SEQUENCES} --steps {STEPS} --warmup 2"
TRAINING = f"{UNTIED} {ADAMW} {SHAPE} --recompute full --attention naive"
RECORD = f"--layer-delay {DELAY} --measure-memory --peak-tflops 0.25"
TP = PP = 2
# The head's product, which torch would not count; from the shapes of its arguments
IN_PLACE = {torch.ops.aten.addmm_: lambda total, a, b, *_, **__: 2 * a[0] * a[1] * b[1]}


def ranks_train(folder: str) -> dict:
    """On this rank: how long the training took, what its sockets sent, what its part of the model holds, its FLOPs."""
    flags = f"{SMALL} {TRAINING} {RECORD} --tp {TP} --pp {PP} --run-dir {folder}"
    mesh = mesh_of(configure(8, flags))
    before, began = sent_so_far(mesh), time.perf_counter()
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        boxes = train_here(8, flags)
    seconds = time.perf_counter() - began
    sockets = None if before is None else sent_so_far(mesh) - before
    size = sum(part.nbytes for *_, part in boxes)
    return {"seconds": seconds, "sockets": sockets, "bytes": size, "flops": counter.get_total_flops()}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[dict, list[dict], dict]:
    """config.json, the record of each step, and what was seen from outside: on rank 0, but FLOPs are those of all."""
    assert environment().rank == 0
    folder = tmp_path_factory.mktemp("run")
    ranks = run_ranks(TP * PP, ranks_train, str(folder))
    ranks[0]["flops"] = sum(rank["flops"] for rank in ranks)
    return json.loads((folder / "config.json").read_text()), steps_of(folder), ranks[0]


def flops_of_a_forward(model: ModelConfig, seq: int) -> tuple[int, int]:
    """What torch counts in the forward of one sequence on one process: all of it, and the head."""
    whole = Decoder(model, naive_attention)
    whole.to_empty(device="cpu")
    for parameter in whole.parameters():
        torch.nn.init.ones_(parameter)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        whole(torch.zeros(1, seq, dtype=torch.int64))
    return counter.get_total_flops(), 2 * seq * model.hidden * model.vocab


def test_losses_norms_and_rates(run):
    """Loss and norm are those of the whole batch and the whole model, as one process has them."""
    config, records, _ = run
    expected = reference(training_of(TRAINING))
    assert [each["step"] for each in records] == list(range(STEPS))
    assert [each["loss"] for each in records] == pytest.approx(expected.losses, rel=1e-10)
    assert [each["grad_norm"] for each in records] == pytest.approx(expected.norms, rel=1e-10)
    assert [each["lr"] for each in records] == [config["lr"] / 2, config["lr"], config["lr"]] == [5e-4, 1e-3, 1e-3]
    assert [each["aux_loss"] for each in records] == [0.0] * STEPS


def test_tokens_and_times(run):
    config, records, rank = run
    tokens = config["global_batch"] * config["seq_len"]
    assert (config["world_size"], config["tp"], config["pp"], config["dp"]) == (4, TP, PP, 1)
    assert [each["tokens"] for each in records] == [tokens, 2 * tokens, 3 * tokens]
    seconds = [each["step_time_s"] for each in records]
    layers, slots = config["layers"] / PP, SEQUENCES + PP - 1  # micro-batches, and the bubble
    assert all(each >= 3e-3 * DELAY * layers * slots for each in seconds) and sum(seconds) < rank["seconds"]
    for each in records:
        assert each["tokens_per_s"] == pytest.approx(tokens / each["step_time_s"], rel=1e-12)


def test_utilisation_is_that_of_all_ranks(run):
    """Of 4 devices, although no sample, no sequence is divided: dp x cp is 1. `full` repeats all but the head. So much
    is what the ranks have computed, together.
    """
    config, records, rank = run
    model = configure(8, f"{SMALL} {TRAINING}", world=1).model_config
    forward, head = flops_of_a_forward(model, config["seq_len"])
    assert rank["flops"] == STEPS * SEQUENCES * (4 * forward - head), "products of all ranks"
    for each in records:
        possible = each["step_time_s"] * 4 * 0.25e12
        assert each["mfu"] == pytest.approx(SEQUENCES * 3 * forward / possible, rel=1e-12)
        assert each["hfu"] == pytest.approx(SEQUENCES * (4 * forward - head) / possible, rel=1e-12)


def test_bytes_of_rank_0(run):
    """It is on the first stage: it sends activations of its tokens forward, and no gradients of them back. Its peak is
    above its weights, gradients and AdamW's two states, and below three times as much: the whole model has four times.
    """
    config, records, rank = run
    message = SEQUENCES * config["seq_len"] * config["hidden"] // TP * 8
    for each in records:
        assert each["comm_bytes"]["pp_forward"] == message + 8, "and an all-reduce of the loss"
        assert each["comm_bytes"].keys() == {"pp_forward", "pp_backward", "tp", "world"}
        assert each["comm_bytes"]["pp_backward"] == 0
        assert 4 * rank["bytes"] < each["peak_memory_bytes"] < 12 * rank["bytes"]
    sent = sum(size for each in records for size in each["comm_bytes"].values())
    assert rank["sockets"] in (None, pytest.approx(sent, rel=0.03)), sent


WHOLE = "--layers 8 --hidden 64 --heads 8 --kv-heads 8 --ffn 64 --experts 8 --seq-len 64 --global-batch 8"
WHOLE += " --data synthetic --micro-batch 1 --peak-tflops 1 --recompute full"
DIVIDED = ("--dp 8", "--tp 8", "--pp 8", "--cp 8", "--dp 8 --ep 8", "--dp 8 --zero 3 --zero-replicas 2")
DIVIDED += ("--dp 2 --tp 2 --cp 2 --ep 4 --zero 1", "--pp 2 --tp 2 --cp 2", "--pp 8 --schedule dualpipe")
CORPUS = SimpleNamespace(name="none", sha256="abc", tokens_sha256="def", tokens=range(1000))
BATCHES = SimpleNamespace(corpus=CORPUS, target_tokens=8 * 64)


def test_a_record_says_the_same_of_the_whole_run_however_it_is_divided(tmp_path, monkeypatch):
    """Of each dimension alone, and of several: only layout, ranks and the devices that share the work are others."""
    monkeypatch.setattr(run_record.collectives, "barrier", lambda group: None)  # there are no others
    monkeypatch.setattr(run_record, "on_all_ranks", lambda mesh, function: function())
    own, found = {*flag_names("layout"), "degrees", "world_size", "backend", "run_dir"}, {}
    for layout in ("", *DIVIDED):
        ranks, folder = 8 if layout else 1, tmp_path / str(len(found))
        config = configure(8, f"{WHOLE} {layout} --run-dir {folder}", ranks)
        world = Group("world", tuple(range(ranks)), 0, backend="gloo" if layout else "")
        mesh = SimpleNamespace(rank=0, world=world, device=torch.device("cpu"), degrees=degrees_of(config))
        record = RunRecord(config, mesh, BATCHES, 0)
        record.end_step(2, 0.5, {"loss": 1.0, "grad_norm": 1.0})
        record.close()
        facts, (step,) = json.loads((folder / "config.json").read_text()), steps_of(folder)
        assert (facts["world_size"], facts["backend"]) == (ranks, "gloo" if layout else None)
        degrees = "dp", "tp", "pp", "cp", "ep"
        assert [facts["degrees"][name] for name in degrees] == [getattr(config, name) for name in degrees]
        step["mfu"], step["hfu"] = ranks * step["mfu"], ranks * step["hfu"]  # as multiples of one device
        found[layout] = {key: value for key, value in facts.items() if key not in own}, step
    flops, tokens = count_flops(config.model_config, 64), found[""][1]["tokens_per_s"]
    assert tokens == 8 * 64 / 0.5 and found[""][1]["mfu"] == pytest.approx(8 * flops.model / 0.5e12)
    assert found == dict.fromkeys(found, found[""])
