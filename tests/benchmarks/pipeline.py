"""Step 5 against torch.distributed.pipelining: same stages, micro-batches and optimizer, taking turns in one run.

    python -m tests.benchmarks.pipeline                            # 2 and 4 gloo ranks, 30 pairs each
    python -m tests.benchmarks.pipeline --ranks 2 --schedules 1f1b --pairs 10
    python -m tests.benchmarks.pipeline --ranks                    # only the last part, about 4 minutes

Each timed call is a whole training step: forward and backward of all micro-batches, clipping by the global norm, AdamW.
Memory and the number of micro-batches in flight are measured apart from that, with one side alone in its processes. The
last part has no peer: every schedule runs with layers that take a fixed time, against what the simulator says.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import pipelining

from common import collectives
from common.config import TrainConfig
from common.model import Decoder
from common.model_config import ModelConfig
from common.process_groups import Degrees, build_mesh
from common.weights.initialisation import materialise, random_values
from step01_single_gpu.clipping import clip_factor, gradient_norm
from step05_pipeline.config import schedule_of
from step05_pipeline.experiments.bubble import DELAY, play
from step05_pipeline.stages import split_layers
from step05_pipeline.train import build
from tests.benchmarks.paired import adamw_settings, compare, keep, measure_steps, parse_options
from tests.harness.ranks import run_ranks

# 15 M parameters; a small vocabulary, so that stages are alike
MODEL = ModelConfig(vocab=384, hidden=384, layers=8, heads=6, kv_heads=6, ffn=1024, tie_embeddings=False)
SEQ, MICRO_BATCHES = 128, 8
PEERS = {"afab": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
PEERS |= {"zbv": "ScheduleZBVZeroBubble"}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(MODEL.vocab, (MICRO_BATCHES, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def configuration(name: str, world: int) -> TrainConfig:
    config = TrainConfig(pp=world, dp=1, schedule=name, seq_len=SEQ, micro_batch=1, global_batch=MICRO_BATCHES)
    config.__dict__["model_config"] = MODEL
    return config


def our_step(name: str, mesh):
    """One training step of step 5 as a function without arguments, and how many micro-batches it had in flight."""
    config = configuration(name, mesh.world.size)
    pipeline, optimizer = build(config, mesh)
    tokens, targets = batch()

    def step():
        loss = pipeline.run(lambda index: (tokens[index : index + 1], targets[index : index + 1]), targets.numel())
        gradients = pipeline.finish()
        norm = gradient_norm(optimizer.parameters, gradients, mesh.world)
        optimizer.step(gradients, config.lr, clip_factor(norm, config.clip))
        collectives.all_reduce(loss, mesh.pp_forward)
        return loss.item()

    return step, lambda: pipeline.step.peak_in_flight


def peer_step(name: str, mesh):
    """The same with PyTorch's stages and schedules."""
    rank, schedule = mesh.rank, schedule_of(configuration(name, mesh.world.size))
    ranges, stages, peak = split_layers(MODEL, schedule.stages, SEQ), [], [0]

    def count_in_flight(*_):  # the stage stores this micro-batch when the hook has returned
        peak[0] = max(peak[0], 1 + sum(len(stage.fwd_cache) for stage in stages))

    for chunk in range(schedule.chunks(rank)):
        _, number = schedule.stage_of(rank, chunk)
        model = Decoder(MODEL, first=ranges[number][0], last=ranges[number][1])
        materialise(model, torch.float32, mesh.device, random_values(0))
        model.register_forward_hook(count_in_flight)
        stages.append(pipelining.PipelineStage(model, number, schedule.stages, mesh.device))

    def mean(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    mine = stages[0] if name in ("afab", "1f1b") else stages
    runner = getattr(pipelining.schedules, PEERS[name])(mine, MICRO_BATCHES, loss_fn=mean)
    first, last = (any(getattr(stage, end) for stage in stages) for end in ("is_first", "is_last"))
    config, model = TrainConfig(), torch.nn.ModuleList([stage.submod for stage in stages])
    parameters, optimizer = list(model.parameters()), torch.optim.AdamW(**adamw_settings(model, config))
    tokens, targets = batch()

    def step():
        losses = []
        runner.step(*([tokens] if first else []), **({"target": targets, "losses": losses} if last else {}))
        gradients = [p.grad for p in parameters]
        total = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(total)
        torch.nn.utils.clip_grads_with_norm_(parameters, config.clip, total.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.all_reduce(loss)
        return loss.item()

    return step, lambda: peak[0]


def on_rank(name: str, pairs: int, sides: tuple[str, ...]):
    """What `measure_steps` returns."""
    mesh = build_mesh(Degrees(pp=dist.get_world_size()), torch.device("cpu"))
    make = {"ours": our_step, "peer": peer_step}
    return measure_steps([make[side](name, mesh)[0] for side in sides], pairs, mesh.device)


def in_flight(name: str) -> tuple[int, int]:
    """Most micro-batches (of all stages of this rank) between their forward and backward: ours, the peer's."""
    mesh = build_mesh(Degrees(pp=dist.get_world_size()), torch.device("cpu"))
    made = our_step(name, mesh), peer_step(name, mesh)
    for step, _ in made:
        step()
    return tuple(peak() for _, peak in made)


def executed_against_simulated() -> dict[str, dict[str, float]]:
    """Makespan and bubble of every schedule on 4 ranks, with layers that sleep, over what the simulator says."""
    simulated, measured, order = play(ranks=4, micro_batches=8, delay=DELAY, steps=3)
    rows = {}
    print(f"executed / simulated, 4 ranks, 8 micro-batches, 8 layers that take {DELAY} ms each")
    for name, expected in simulated.items():
        found = measured[name]
        makespan, bubble = found.makespan / expected.makespan, found.bubble / expected.bubble
        row = {"makespan_ratio": makespan, "bubble_ratio": bubble, "executed_ms": found.makespan}
        rows[f"executed_{name}"] = row | {"simulated_ms": expected.makespan, "same_order": order[name]}
        print(f"  {name:14} makespan {makespan:.4f}  bubble {bubble:.3f}  same order: {order[name]}", flush=True)
    return rows


def main() -> None:
    from tests.benchmarks.pipeline import in_flight, on_rank  # by the names under which ranks can import them

    arguments, rows = parse_options(__doc__, pairs=30, schedules=list(PEERS)), {}
    print("step 5 / torch.distributed.pipelining: throughput, median of pairs [95% interval]; peak memory")
    for world in arguments.ranks:
        for name in arguments.schedules:
            row = compare(f"{name} against {PEERS[name]}", world, on_rank, name, arguments.pairs)
            ours, peer = zip(*run_ranks(world, in_flight, name, timeout=600), strict=True)
            print(f"    in flight  {ours} against {peer} micro-batches on ranks 0 to {world - 1}", flush=True)
            rows[f"{name}_{world}_ranks"] = row | {"in_flight": ours, "peer_in_flight": peer}
    rows |= executed_against_simulated()
    print(f"written: {keep('pipeline', rows)}")


if __name__ == "__main__":
    main()
