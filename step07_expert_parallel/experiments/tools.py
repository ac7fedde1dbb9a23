"""What the experiments of this step share: a small model with experts, and trainings whose routers are watched."""

import functools
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from common.experiments.local_ranks import on_ranks, train_quietly
from common.process_groups import Mesh
from common.record.run_record import read_metrics
from step07_expert_parallel.router import Balancing
from step07_expert_parallel.train import train

STEP = {"step_name": "step07_expert_parallel"}  # a configuration of no step, or of an earlier one, refuses experts

# Its MLPs are so narrow that a few hundred steps show whether more parameters help
SMALL = STEP | {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "seq_len": 64, "lr": 1e-2}
SMALL |= {"global_batch": 16, "micro_batch": 16}
STEPS = 600
DENSE = SMALL | {"ffn": 32}
MOE = SMALL | {"experts": 8, "top_k": 2, "expert_ffn": 16}  # two experts are as wide as the dense MLP
# The default rate suits runs of many thousand steps; this one crosses the range of scores within a hundred
BALANCES = {"none": {"balance": "none"}, "aux": {"balance": "aux"}, "bias": {"balance": "bias", "bias_rate": 0.01}}


class Training(NamedTuple):
    """What is known of a training, step by step."""

    record: list[dict]  # the lines of metrics.jsonl
    loads: list[list[list[int]]]  # [step][layer][expert]: how many tokens have chosen the expert
    seconds: float

    def mean(self, key: str, steps: int) -> float:
        """The mean of a number of the record over the last steps."""
        return sum(line[key] for line in self.record[-steps:]) / steps


def trainings(cases: list[dict]) -> list[Training]:
    """Train with each of these flags, each in a process of its own, two of them at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda flags: _training(tuple(flags.items())), cases))


@functools.cache  # experiments that are run together share trainings
def _training(flags: tuple) -> Training:
    return on_ranks(1, watch, dict(flags))[0]


def watch(mesh: Mesh, done: Callable, flags: dict) -> Training:
    """On the only rank: train.py's training, with the loads that `Balancing` finds at the end of every step."""
    loads, finish = [], Balancing.finish

    def read_and_finish(self: Balancing, *args, **named):
        loads.append([router.load.tolist() for _, router in self.routers])
        return finish(self, *args, **named)

    with tempfile.TemporaryDirectory() as folder, patch.object(Balancing, "finish", read_and_finish):
        train_quietly(train, **flags, run_dir=folder)
        record = read_metrics(Path(folder, "metrics.jsonl"))[0]
    return Training(record, loads, sum(line["step_time_s"] for line in record))
