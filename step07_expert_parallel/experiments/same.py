"""The same model, wherever its experts are: curves and gradients beside those of one process that holds all of them."""

from functools import partial

from torch import Tensor

from common.experiments.gradients import compare_gradients, worst_difference
from common.experiments.local_ranks import on_ranks
from common.experiments.runs import overlay
from common.experiments.training_step import on_every_case
from common.process_groups import Mesh
from step07_expert_parallel.experiments.ranks import Run
from step07_expert_parallel.experiments.tools import STEP
from step07_expert_parallel.train import train

# Everything that a router can do, and a dense layer
FLOAT64 = STEP | {"layers": 4, "hidden": 64, "ffn": 96, "heads": 8, "kv_heads": 4, "vocab": 387, "data": "synthetic"}
FLOAT64 |= {"experts": 8, "expert_ffn": 32, "top_k": 3, "shared_experts": 1, "dense_layers": 1, "gate": "sigmoid"}
FLOAT64 |= {"expert_groups": 4, "node_limit": 2, "aux_coef": 0.1, "z_coef": 0.01, "capacity_factor": 1.0}
FLOAT64 |= {"seq_len": 48, "micro_batch": 1, "global_batch": 8, "warmup": 1, "dtype": "float64"}


def gradients(quick: bool) -> None:
    """Gradients of experts on several ranks against one process that holds all experts, in float64."""
    cases = [(2, "ep 2", {"ep": 2})]
    if not quick:
        cases += [(2, "ep 1: every rank has all experts", {}), (2, "ep 2, cp 2", {"ep": 2, "cp": 2})]
        cases += [(4, "ep 4", {"ep": 4}), (4, "ep 2", {"ep": 2}), (4, "ep 4, tp 2", {"ep": 4, "tp": 2})]
        cases += [(4, f"ep 2, ZeRO {stage}", {"ep": 2, "zero": stage}) for stage in (1, 2, 3)]
        cases.append((4, "ep 4, cp 2, tp 2", {"ep": 4, "cp": 2, "tp": 2}))
        cases.append((4, "ep 2, full recomputation", {"ep": 2, "recompute": "full"}))
        pipelines = ("1f1b", "zb-h1", "dualpipe", "dualpipev")
        cases += [(4, f"ep 2, pp 2, {name}", {"ep": 2, "pp": 2, "schedule": name}) for name in pipelines]
    whole = on_ranks(1, whole_gradients, title="one process")[0]
    difference = partial(gradient_difference, whole)
    compare_gradients(on_every_case, difference, [(ranks, name, FLOAT64 | flags) for ranks, name, flags in cases])


def whole_gradients(mesh: Mesh, done) -> dict[str, Tensor]:
    """On the only rank: the gradient of each parameter, by name."""
    run = Run(mesh, **FLOAT64)
    return {
        parameter.spec.name: gradient.view(parameter.spec.global_shape)
        for parameter, gradient in zip(run.optimizer.parameters, run.gradients(), strict=True)
    }


def gradient_difference(whole: dict[str, Tensor], mesh: Mesh, flags: dict) -> float:
    """The largest relative difference between a gradient of this rank and its part of one process's gradient."""
    run = Run(mesh, **flags)
    return worst_difference(run.optimizer.parameters, run.gradients(), whole)


def curves(quick: bool) -> None:
    """The default run with 8 experts, on several ranks beside one process: the same loss and gradient norm."""
    model = STEP | {"experts": 8, "expert_ffn": 128} | ({"seq_len": 32} if quick else {})
    variants = {"one": (1, model), "ep 2": (2, model | {"ep": 2})}
    if not quick:
        variants["ep 4, tp 2"] = (4, model | {"ep": 4, "tp": 2})
        variants["ep 2, cp 2, ZeRO 3"] = (4, model | {"ep": 2, "cp": 2, "zero": 3})
        variants["ep 2, pp 2, dualpipe"] = (4, model | {"ep": 2, "pp": 2, "schedule": "dualpipe", "micro_batch": 1})
    overlay(train, variants, quick)
