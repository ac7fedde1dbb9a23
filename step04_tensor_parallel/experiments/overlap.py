"""How much of tensor parallelism's communication hides behind products, over a simulated link."""

import time
from collections.abc import Callable

import torch

from common import collectives
from common.config import TrainConfig
from common.costs.alpha_beta import Player
from common.drawing.tables import print_table
from common.experiments.local_ranks import on_ranks
from common.experiments.traces import TracedPart, print_hidden, quietest, run_cases, run_parts
from common.group import Group
from common.link import Link
from common.process_groups import Mesh
from common.tracing.tracer import Tracer
from step01_single_gpu.running.slow_device import SlowDevice
from step04_tensor_parallel import cost
from step04_tensor_parallel.experiments.timelines import draw_backwards, draw_layers
from step04_tensor_parallel.experiments.tools import WAYS, training, way_of
from step04_tensor_parallel.train import train

MODEL = {"layers": 1, "hidden": 512, "ffn": 1536, "heads": 8, "kv_heads": 8, "data": "synthetic", "warmup": 1}
MODEL |= {"seq_len": 256, "micro_batch": 2, "global_batch": 2, "tp": 2}
SLOW_LINK, SLOW = "2000,0.015", 6e9  # of the lesson's command: devices so slow that two cores are enough for both
LINK = "200,0.15"  # 0.2 ms a message, 0.15 GB/s: to these products what a network between nodes is to real ones

PANELS = {
    "SP, plain": "plain",
    "no SP, overlap": "overlap, no sequence parallelism",
    "SP, overlap": "overlap (default)",
    "SP, chunked": "chunked",
}


def overlap(quick: bool) -> None:
    """Plain, overlap and chunked over a slow link: exposed communication, step time, and timelines."""
    times = on_ranks(2, product_times, title="products")[0]
    shown = ", ".join(f"{name} " + " / ".join(f"{1e3 * each:.1f}" for each in three) for name, three in times.items())
    print(f"\nProducts alone, from which predictions start, ms (forward / dx / dw): {shown}")
    cases = {name: MODEL | {"steps": 12 if quick else 40, "link": LINK} | flags for name, flags in WAYS.items()}
    traces = run_cases(train, 2, cases, title="overlap", rounds=1 if quick else 4)
    players = {name: play(MODEL | WAYS[name], Link.parse(LINK), times) for name in traces}
    print_hidden(f"2 ranks, --link {LINK}", players, traces)
    draw_layers([(title, traces[name], name.startswith("SP")) for name, title in PANELS.items()], "timelines")


def backward(quick: bool) -> None:
    """The backward of an MLP in modes plain and overlap, on simulated devices: what hides behind which product."""
    modes = {mode: mode for mode in ("plain", "overlap")}
    traces = run_parts(2, slow_step, modes, steps=2 if quick else 4, title="backward")
    found = draw_backwards(traces, "backward")
    rows = []
    for mode, (takes, waits) in found.items():
        row = quietest(traces[mode])
        whole = f"{1e3 * row.communication_s:.0f}", f"{1e3 * row.exposed_s:.0f}", f"{row.overlap_share:.0%}"
        rows.append((mode, f"{takes:.0f}", f"{waits:.0f}", *whole))
    header = ("", "MLP's backward, ms", "it waits", "whole step: communication", "exposed", "hidden")
    print_table(f"2 ranks, --link {SLOW_LINK} --compute {SLOW / 1e9:g}", header, rows)


def slow_step(mesh: Mesh, mode: str) -> TracedPart:
    """On a rank: one training step, whose products are phases of the trace and take the time of a slow device."""
    run = training(mesh, MODEL | {"tp_mode": mode, "link": SLOW_LINK})

    def step(tracer: Tracer) -> None:
        with SlowDevice(SLOW, tracer):
            run.take(tracer=tracer)

    return TracedPart(step, run.mesh)


def play(flags: dict, link: Link, times: dict) -> Player:
    """The alpha-beta model's micro-batch on two ranks; `times` as of `cost.play_step`."""
    config = TrainConfig(**flags)
    model, tokens, player = config.model_config, config.micro_batch * config.seq_len, Player(2, link)
    stream, norms = 4 * tokens * model.hidden, 4 * (2 * model.layers + 1) * model.hidden
    cost.play_step(way_of({"tp_mode": config.tp_mode} | flags), player, model.layers, stream, tokens, norms, times)
    return player


def product_shapes(flags: dict) -> dict[str, list[tuple[int, int]]]:
    """(out, in) of the weights that one of two ranks holds, by name; those of one input together."""
    model = TrainConfig(**flags).model_config
    heads, keys = model.heads * model.head_width // 2, model.kv_heads * model.head_width // 2
    ffn, vocab, hidden = model.ffn // 2, model.vocab // 2, model.hidden
    shapes = {"qkv": [(heads, hidden), (keys, hidden), (keys, hidden)], "o": [(hidden, heads)]}
    return shapes | {"gate_up": [(ffn, hidden)] * 2, "down": [(hidden, ffn)], "head": [(vocab, hidden)]}


def product_times(mesh: Mesh, done: Callable) -> dict[str, tuple[float, float, float]]:
    """On a rank, while the other does the same: seconds of each layer's three products, least of many."""
    tokens, result = MODEL["micro_batch"] * MODEL["seq_len"], {}
    for name, weights in product_shapes(MODEL).items():
        alone = [
            _products(torch.randn(tokens, inside), torch.randn(out, inside), mesh.world) for out, inside in weights
        ]
        result[name] = tuple(map(sum, zip(*alone)))
    return result


def _products(x: torch.Tensor, weight: torch.Tensor, group: Group) -> list[float]:
    """Seconds of x W', dy W and dy' x."""
    gradient, seconds = torch.randn(x.shape[0], weight.shape[0]), []
    for product in (lambda: x @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ x):
        collectives.barrier(group)
        trials = []
        for _ in range(20):
            start = time.perf_counter()
            product()
            trials.append(time.perf_counter() - start)
        seconds.append(min(trials))
    return seconds
