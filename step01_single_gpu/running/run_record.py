"""The record of a training run: `config.json`, `metrics.jsonl` and the progress on the screen."""

import contextlib
import dataclasses
import gc
import json
import math
import os
import platform
import time
from pathlib import Path

import torch

from common import collectives
from common.config import TrainConfig
from common.counts import count_flops
from common.errors import UsageError
from common.launching.all_ranks import on_all_ranks
from common.metrics import line_of, read_metrics
from common.process_groups import Mesh
from step01_single_gpu.data.batches import Batches
from step01_single_gpu.running.dashboards import open_dashboard
from step01_single_gpu.running.memory_meter import MemoryMeter
from step01_single_gpu.running.utilisation import peak_flops, utilisation

SILENCE = 10.0  # seconds after which the next step is shown in any case


class RunRecord:
    """Times every step of a run. Rank 0 shows the progress and, with --run-dir, writes the record.

    `config.json` holds everything needed to repeat the run, and `metrics.jsonl` one object per step. Of a record that
    is there already the steps below `kept` stay, which are this run's own: a run that resumes from its folder goes on
    with its record, and every other run replaces what it finds. All numbers describe the whole run, except that
    `comm_bytes` (model bytes sent, by group) and `peak_memory_bytes` are those of rank 0. On the CPU the peak is
    measured only with --measure-memory, because reading the allocator's events slows a step down. JSON knows no numbers
    that are not finite: "NaN", "Infinity" and "-Infinity" are strings there (as in protobuf's JSON), which
    `read_metrics` turns into numbers again.

    With --log-to, a dashboard shows the same numbers.

    Raises UsageError on all ranks if --run-dir cannot be written, or if its record cannot be continued.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, batches: Batches, kept: int):
        self.config, self.mesh, self.file, self.shown = config, mesh, None, 0.0
        self.show, self.end_show = (lambda record: None), (lambda: None)  # on a dashboard
        self.meter = MemoryMeter(mesh.device, on_cpu=config.measure_memory)
        flops, corpus = count_flops(config.model_config, config.seq_len), batches.corpus
        collectives.barrier(mesh.world)  # so that all ranks measure at once, and each sees its own share of a CPU
        peak, source = peak_flops(mesh.device, config.torch_dtype, config.peak_tflops)
        self.facts = dataclasses.asdict(config) | {
            "model_config": dataclasses.asdict(config.model_config),
            "degrees": dataclasses.asdict(mesh.degrees),
            "world_size": mesh.world.size,
            "backend": mesh.world.backend or None,
            "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if mesh.world.backend == "nccl" else None,
            "corpus": corpus.name,
            "corpus_sha256": corpus.sha256,
            "tokens_sha256": corpus.tokens_sha256,
            "corpus_tokens": len(corpus.tokens),
            "tokens_per_step": batches.target_tokens,
            "model_flops_per_step": flops.model * config.global_batch,
            "hardware_flops_per_step": flops.hardware(config.recompute) * config.global_batch,
            "peak_flops": peak,
            "peak_source": source,
            "torch_version": torch.__version__,
            "python_version": platform.python_version(),
        }
        on_all_ranks(mesh, lambda: self._open(kept) if mesh.rank == 0 and config.run_dir is not None else None)

    @contextlib.contextmanager
    def step(self, step: int):
        """Time one step. The block puts loss, grad_norm, lr and, if there is one, aux_loss into the dict it receives.

        The block ends with reading the loss, for which the host waits for the device: so the time is that of the work.
        """
        collectives.sent_bytes.clear()
        measured = {"loss": math.nan, "aux_loss": 0.0}
        began = time.perf_counter()
        with self.meter.measure(self._alive()) as memory:
            yield measured
        seconds = time.perf_counter() - began
        measured |= {"peak_memory_bytes": memory.peak_bytes, "comm_bytes": dict(collectives.sent_bytes)}
        self.end_step(step, seconds, measured)

    def end_step(self, step: int, seconds: float, measured: dict) -> None:
        """Write and show the record of a step that took `seconds`. From then on it survives the end of the process."""
        tokens, devices = self.facts["tokens_per_step"], (self.mesh.world.size, self.facts["peak_flops"])
        timed = {"tokens": (step + 1) * tokens, "step_time_s": seconds, "tokens_per_s": tokens / seconds}
        for name, flops in (("mfu", "model_flops_per_step"), ("hfu", "hardware_flops_per_step")):
            timed[name] = utilisation(self.facts[flops], seconds, *devices)
        if self.file is not None:
            try:
                self.file.write(line_of({"step": step} | measured | timed))
                self.file.flush()
                self.show({"step": step} | measured | timed)
            except OSError as error:  # the disk is full, say
                raise UsageError(f"--run-dir {self.config.run_dir} cannot be written: {error.strerror}") from None
        steps, now = self.config.steps, time.monotonic()
        worth_a_line = step % max(1, steps // 20) == 0 or step == steps - 1 or now - self.shown > SILENCE
        if self.mesh.rank == 0 and worth_a_line:
            self.shown, speed = now, f"{timed['tokens_per_s']:,.0f} tokens/s"
            text = f"loss {measured['loss']:.4f}  grad norm {measured['grad_norm']:.4f}  {speed}"
            print(f"step {step:>{len(str(steps))}}/{steps}  {text}", flush=True)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.end_show()

    def _open(self, kept: int) -> None:
        folder = Path(self.config.run_dir)
        path, config = folder / "metrics.jsonl", folder / "config.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            earlier = read_metrics(path) if kept and path.exists() else []
            facts = json.dumps(self.facts, indent=2, sort_keys=True)
            lines = "".join(line_of(each) for each in earlier if each["step"] < kept)
            for file, text in ((config, f"{facts}\n"), (path, lines)):
                file.with_suffix(".new").write_text(text, encoding="utf-8")
            for file in (config, path):
                os.replace(file.with_suffix(".new"), file)  # a kill or a full disk leaves the old file or the new one
            self.file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--run-dir {folder} cannot be written: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"--run-dir {folder} cannot be continued: {error}") from None
        if self.config.log_to:
            self.show, self.end_show = open_dashboard(self.config.log_to, folder, self.facts, kept)

    def _alive(self):
        """On the CPU, every tensor that lives when a step begins: the level above which its allocations count."""
        if self.config.measure_memory and self.mesh.device.type == "cpu":
            yield from (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
