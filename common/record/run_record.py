"""The record of a training run: `metrics.RunRecord` with all that follows from its configuration filled in."""

import contextlib
import dataclasses
import gc

import torch

from common import collectives
from common.all_ranks import on_all_ranks
from common.config import TrainConfig
from common.counts import count_flops
from common.data.batches import Batches
from common.errors import UsageError
from common.measure.allocator import MemoryMeter
from common.process_groups import Mesh
from common.record.metrics import StepLog, peak_flops


class RunRecord(StepLog):
    """Times and records the steps of a training run; rank 0 writes.

    `comm_bytes` are model bytes that rank 0 sent, by group. `peak_memory_bytes` is rank 0's allocator peak; on the CPU
    it is known only with --measure-memory, since reading the allocator's events slows a step down.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, batches: Batches, first_step: int):
        flops = count_flops(config.model_config, config.seq_len)
        collectives.barrier(mesh.world)  # CPUs are measured by all ranks at once, so that each sees its own share
        peak, source = peak_flops(mesh.device, config.torch_dtype, config.peak_tflops)
        described = dataclasses.asdict(config) | {
            "model_config": dataclasses.asdict(config.model_config),
            "degrees": dataclasses.asdict(mesh.degrees),
            "corpus": batches.corpus.name,
            "corpus_sha256": batches.corpus.sha256,
            "corpus_tokens": len(batches.corpus.tokens),
        }
        numbers = {
            "total_steps": config.steps,
            "first_step": first_step,
            "tokens_per_step": batches.target_tokens,
            "model_flops_per_step": flops.model * config.global_batch,
            "hardware_flops_per_step": flops.hardware(config.recompute) * config.global_batch,
            "peak_flops": peak,
            "peak_source": source,
        }
        place = {"writer": mesh.rank == 0, "world_size": mesh.world.size, "device": mesh.device}

        def start() -> None:
            try:
                StepLog.__init__(self, config.run_dir, described, **numbers, **place)
            except OSError as error:
                raise UsageError(f"--run-dir {config.run_dir} cannot be written: {error.strerror}") from None

        on_all_ranks(mesh, start)
        self.meter = MemoryMeter(mesh.device, on_cpu=config.measure_memory)
        self.measure_on_cpu = config.measure_memory and mesh.device.type == "cpu"

    @contextlib.contextmanager
    def step(self, step: int):
        """Time one step; the block puts loss, grad_norm and lr into the dictionary that it is given."""
        collectives.reset_bytes()
        measured = {}
        self.begin_step()
        with self.meter.measure(self._alive()) as memory:
            yield measured
        bytes_by_group = dict(collectives.sent_bytes)
        self.end_step(step, **measured, peak_memory_bytes=memory.peak_bytes, comm_bytes=bytes_by_group)

    def _alive(self):
        """On the CPU, every tensor that lives when a step begins: the level above which its allocations count."""
        if self.measure_on_cpu:
            yield from (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and not each.is_cuda)
