"""Experts on two ranks, in a model that had none: each MLP of transformers' Llama gives way to a router and experts."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.group import Group
from step01_single_gpu.mixed_precision import LossScaler
from step07_expert_parallel.balancing import Balancing
from step07_expert_parallel.capacity import SequenceParts
from step07_expert_parallel.experts import Experts
from step07_expert_parallel.moe import MoE
from step07_expert_parallel.router import Router, Routing
from tests.foreign import models
from tests.foreign.models import PRELOAD  # noqa: F401 (of the fork server)
from tests.harness.ranks import run_ranks

EXPERTS, HIDDEN, STEPS, RATE = 8, 16, 3, 0.1
CASES = {  # a routing, and the rate at which biases move
    "softmax, auxiliary loss": (Routing(EXPERTS, 2, aux_coef=0.5, z_coef=0.1, capacity_factor=0.9), 0.0),
    "sigmoid, bias": (Routing(EXPERTS, 3, gate="sigmoid", groups=4, groups_per_token=2, scale=2.5), 0.1),
}


def mixture_of(routing: Routing, ep: Group) -> nn.Module:
    """Llama with experts, of which this rank holds its part. What was the MLP is what all tokens pass through."""
    model, alone = models.llama(), Group("alone", (ep.ranks[ep.rank],), 0)
    parts, scaler = SequenceParts(cp=alone, tp=alone), LossScaler(torch.float64)
    for layer in model.model.layers:
        router = Router(HIDDEN, routing, parts, models.SEQUENCES, scaler, torch.float64)
        experts = Experts(EXPERTS, HIDDEN, 12)
        for weight in (router.weight, *experts.parameters()):  # all ranks draw the same
            nn.init.normal_(weight, std=0.5)
        for weight in experts.parameters():
            weight.data = weight.data.chunk(ep.size)[ep.rank].clone()
        layer.mlp = MoE(router, experts, layer.mlp, ep).double()
    return model


def train(case: str, world: Group, micro_batch: int) -> list[dict[str, Tensor]]:
    """What some steps of SGD say of themselves, all gradients and all biases; of experts, those of this rank."""
    routing, rate = CASES[case]
    model, found = mixture_of(routing, ep=world), []
    routers = [(index, layer.mlp.router) for index, layer in enumerate(model.model.layers)]
    balancing = Balancing(routers, range(len(routers)), EXPERTS, rate, world)
    for step in range(STEPS):
        model.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for rows in models.tokens(step).chunk(world.size)[world.rank].split(micro_batch):
            share = models.loss_of(model, rows)
            share.backward()
            loss += share.detach()
        for shared in (loss, *(each.grad for name, each in model.named_parameters() if ".experts." not in name)):
            if world.size > 1:  # an expert has seen the tokens of all ranks
                dist.all_reduce(shared, group=world.handle)
        found.append({"loss": loss} | balancing.finish())
        found[-1] |= {f"bias {index}": router.bias.clone() for index, router in routers}
        for name, parameter in model.named_parameters():
            found[-1][name] = parameter.grad
            parameter.data -= RATE * parameter.grad
            parameter.grad = None
    return found


def on_two_ranks(case: str) -> list[dict[str, Tensor]]:
    return train(case, Group.of(dist.group.WORLD, "ep"), micro_batch=1)


@pytest.mark.parametrize("case", CASES)
def test_llama_with_experts_on_two_ranks(case):
    """Loss, statistics, biases and every gradient are those of one process."""
    expected = train(case, Group("alone", (0,), 0), micro_batch=models.SEQUENCES)
    ranks = run_ranks(2, on_two_ranks, case)
    for step, numbers in enumerate(expected):
        for name, whole in numbers.items():
            parts = [rank[step][name] for rank in ranks]
            for part, ours in zip(parts, whole.chunk(2) if ".experts." in name else (whole, whole), strict=True):
                torch.testing.assert_close(part, ours, rtol=0, atol=1e-10, msg=f"step {step}: {name}")
    last = expected[-1]
    has_bias = CASES[case][1] > 0
    assert any(last[f"bias {index}"].any() for index in range(3)) == has_bias, "else the case would show less"
    assert (last["aux_loss"] > 0) == (last["dropped"] > 0) == (not has_bias), "else the case would show less"
