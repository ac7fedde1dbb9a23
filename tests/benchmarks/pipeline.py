"""Step 5 against torch.distributed.pipelining: same stages, micro-batches and optimizer, taking turns in one run.

python -m tests.benchmarks.pipeline                            # 2 and 4 gloo ranks, 30 pairs each
python -m tests.benchmarks.pipeline --ranks 2 --schedules 1f1b --pairs 10
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import pipelining

from step05_pipeline.config import schedule_of
from step05_pipeline.stages import split_layers
from tests.benchmarks import paired
from tests.benchmarks.kept import keep
from tests.benchmarks.paired import adamw, compare, first_batch, our_step, parse_options
from tests.harness.ranks import run_ranks

# 15 M parameters; a small vocabulary, so that stages are alike
MODEL = "--vocab 384 --hidden 384 --layers 8 --heads 6 --kv-heads 6 --ffn 1024 --no-tie-embeddings --seq-len 128"
MICRO_BATCHES = 8
PEERS = {"afab": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
PEERS |= {"zbv": "ScheduleZBVZeroBubble"}


def peer_step(flags: str):
    """The same with PyTorch's stages and schedules. `step.peak`: how many micro-batches were in flight."""
    config, mesh, tokens, targets = first_batch(flags)
    schedule, stages = schedule_of(config), []
    ranges = split_layers(config.model_config, schedule.stages, config.seq_len)

    def count_in_flight(*_):  # the stage stores this micro-batch when the hook has returned
        step.peak = max(step.peak, 1 + sum(len(stage.fwd_cache) for stage in stages))

    for chunk in range(schedule.chunks(mesh.rank)):
        _, number = schedule.stage_of(mesh.rank, chunk)
        model = paired.whole_model(config, first=ranges[number][0], last=ranges[number][1])
        model.register_forward_hook(count_in_flight)
        stages.append(pipelining.PipelineStage(model, number, schedule.stages, mesh.device))

    mine = stages if len(stages) > 1 else stages[0]
    runner = getattr(pipelining.schedules, PEERS[config.schedule])(mine, MICRO_BATCHES, loss_fn=paired.mean_loss)
    first, last = (any(getattr(stage, end) for stage in stages) for end in ("is_first", "is_last"))
    model = torch.nn.ModuleList([stage.submod for stage in stages])
    parameters, optimizer = list(model.parameters()), adamw(model, config)

    def step():
        losses = []
        runner.step(*([tokens] if first else []), **({"target": targets, "losses": losses} if last else {}))
        total = torch.nn.utils.get_total_norm([p.grad for p in parameters]).square()
        dist.all_reduce(total)
        torch.nn.utils.clip_grads_with_norm_(parameters, config.clip, total.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.all_reduce(loss)
        return loss.item()

    step.peak = 0
    return step


def step_without_hooks(flags: str):
    """Ours, but autograd adds the gradients up, as on PyTorch's side: what do the hooks that take them cost?

    This is right in float32 on one data-parallel rank only, where the sums neither are wider nor travel.
    """
    step, (pipeline, _) = paired.our_training(5, flags)
    parameters = [p for zero in pipeline.zero_wrappers for unit in zero.units for p in unit.parameters]
    for parameter in parameters:
        parameter._post_accumulate_grad_hooks.clear()

    def finish() -> list[torch.Tensor]:
        gradients = [parameter.grad.flatten() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return gradients

    pipeline.finish = finish
    for zero in pipeline.zero_wrappers:
        zero.launch_rest = lambda: None
    return step


def in_flight(flags: str) -> tuple[int, int]:
    """Most micro-batches (of all stages of this rank) between their forward and backward: ours, the peer's."""
    (ours, (pipeline, _)), theirs = paired.our_training(5, flags), peer_step(flags)
    ours()
    theirs()
    return pipeline.step.peak_in_flight, theirs.peak


def main() -> None:
    options, rows = parse_options(__doc__, schedules=list(PEERS)), {}
    print("step 5 / torch.distributed.pipelining: throughput, median of pairs [95% interval]; peak memory")
    for world in options.ranks:
        for name in options.schedules:
            flags = f"{MODEL} --micro-batch 1 --global-batch {MICRO_BATCHES} --pp {world} --schedule {name}"
            sides = partial(our_step, 5, flags), partial(peer_step, flags)
            row = compare(f"{name} against {PEERS[name]}", world, *sides, options.pairs)
            ours, peer = zip(*run_ranks(world, in_flight, flags, timeout=600), strict=True)
            print(f"    in flight  {ours} against {peer} micro-batches on ranks 0 to {world - 1}", flush=True)
            rows[f"{name}_{world}_ranks"] = row | {"in_flight": ours, "peer_in_flight": peer}
        if "1f1b" in options.schedules:
            flags = f"{MODEL} --micro-batch 1 --global-batch {MICRO_BATCHES} --pp {world} --schedule 1f1b"
            sides = partial(step_without_hooks, flags), partial(peer_step, flags)
            title = "1f1b without hooks against Schedule1F1B"
            rows[f"1f1b_without_hooks_{world}_ranks"] = compare(title, world, *sides, options.pairs)
    keep("pipeline", rows, options.pairs, options.whole)


if __name__ == "__main__":
    paired.run_as_module("pipeline")
