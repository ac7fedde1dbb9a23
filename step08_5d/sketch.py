"""All five dimensions at once. Each of them is a group of ranks, and a few lines:

    dimension   divides                     sends                              in
    dp          sequences                   gradients, once per step           train
    pp          layers                      the output of a stage              run
    cp          the tokens of a sequence    keys and values                    attention
    tp          heads; tokens elsewhere     tokens to heads, and sums back     attention
    ep          experts                     tokens to experts, results back    experts

    python step08_5d/sketch.py
    torchrun --nproc_per_node 16 step08_5d/sketch.py

Both commands print the same losses, up to rounding; 2, 4 and 8 ranks do so, too. A layer is attention, then experts in
the place of an MLP. Autograd goes back through what a rank has computed, and `Mirrored` messages send gradients back.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor

LAYERS, WIDTH, HEADS, HEAD, EXPERTS, CHOICES = 2, 16, 4, 4, 8, 2
SEQUENCES, TOKENS, STEPS, LEARNING_RATE = 4, 16, 5, 0.1
# Number of ranks: (dp, pp, cp, tp, ep)
DEGREES = {1: (1, 1, 1, 1, 1), 2: (1, 1, 1, 2, 2), 4: (1, 1, 2, 2, 2), 8: (1, 2, 2, 2, 4), 16: (2, 2, 2, 2, 4)}


def make_groups(dp: int, pp: int, cp: int, tp: int, ep: int) -> list[dist.ProcessGroup]:
    """Return my group along each dimension, and the two over which gradients are summed: dp_cp and edp."""
    # --- write this yourself ---
    grid = torch.arange(dp * pp * cp * tp).view(dp, pp, cp, tp)
    dealt = grid.movedim(1, 0).reshape(pp, -1, ep)  # step 7: the ranks of each stage, dealt into rows of ep
    rows = [*(grid.movedim(axis, -1) for axis in range(4)), dealt]  # each row is a group
    rows += [grid.movedim(2, -1).movedim(0, -2).flatten(-2), dealt.movedim(1, -1)]
    # --- until here ---
    return [dist.new_subgroups_by_enumeration(each.flatten(0, -2).tolist())[0] for each in rows]


def part(whole: Tensor, group: dist.ProcessGroup, axis: int = 0) -> Tensor:
    """Return my part of a tensor that a group divides along an axis."""
    return whole.chunk(group.size(), axis)[group.rank()].clone()


class Mirrored(torch.autograd.Function):
    """`there` sends something in the forward. In the backward, `back` sends its gradient the opposite way."""

    @staticmethod
    def forward(context, x, there, back, group, *way):
        context.back = lambda dy: back(dy, group, *way[::-1])
        return there(x, group, *way)

    @staticmethod
    def backward(context, dy):
        return context.back(dy), *[None] * (len(context.needs_input_grad) - 1)


def gather(mine: Tensor, tp: dist.ProcessGroup) -> Tensor:
    """Return the tokens of all ranks."""
    parts = [torch.empty_like(mine) for _ in range(tp.size())]
    dist.all_gather(parts, mine, tp)
    return torch.cat(parts)


def reduce_scatter(whole: Tensor, tp: dist.ProcessGroup) -> Tensor:
    """Return my tokens of the sum of all ranks' tensors."""
    summed = torch.empty_like(part(whole, tp))
    dist.reduce_scatter(summed, list(whole.chunk(tp.size())), group=tp)
    return summed


def pass_on(mine: Tensor, cp: dist.ProcessGroup, after: int, before: int) -> Tensor:
    """Send a tensor to the rank after me in a ring, and return what the rank before me sends."""
    sending, arriving = dist.isend(mine, group=cp, group_dst=after), torch.empty_like(mine)
    dist.recv(arriving, group=cp, group_src=before)
    sending.wait()
    return arriving


def exchange(rows: Tensor, ep: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    """Send `sent[j]` rows to each rank j, in this order. Returns the `received[j]` rows from each rank."""
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows, received, sent, ep)
    return arrived


def attention(x: Tensor, qkv: Tensor, out: Tensor, cp: dist.ProcessGroup, tp: dist.ProcessGroup) -> Tensor:
    """Return what my tokens find in the whole sequence before them."""
    q, k, v = Mirrored.apply(x, gather, reduce_scatter, tp) @ qkv  # tp: the tokens of all its ranks, for my heads
    positions, me, ranks = torch.arange(TOKENS).chunk(cp.size()), cp.rank(), cp.size()
    weighted = total = 0
    for hop in range(ranks):  # step 6, with contiguous parts
        if hop > 0:  # cp: from the rank before me, the keys and values of rank me - hop
            k, v = Mirrored.apply(torch.stack((k, v)), pass_on, pass_on, cp, (me + 1) % ranks, (me - 1) % ranks)
        later = positions[me - hop] > positions[me][:, None]
        p = (q @ k.mT * HEAD**-0.5).exp().masked_fill(later, 0)  # each key's weight (small: no maximum is subtracted)
        weighted, total = weighted + p @ v, total + p.sum(-1, keepdim=True)
    y = (weighted / total @ out).sum(0)  # (my heads, tokens, WIDTH), added up over my heads
    return Mirrored.apply(y, reduce_scatter, gather, tp)  # tp: the sum of all heads, for my tokens


def experts(x: Tensor, router: Tensor, up: Tensor, down: Tensor, ep: dist.ProcessGroup) -> Tensor:
    """Return what their experts make of my tokens. `up` and `down` are the weights of my experts."""
    best, chosen = (x @ router).topk(CHOICES)
    order = chosen.flatten().argsort(stable=True)  # by expert; choice i is one of token i // CHOICES
    counts = chosen.flatten().bincount(minlength=EXPERTS).view(ep.size(), -1)  # by rank and expert
    arrivals = exchange(counts, ep, [1] * ep.size(), [1] * ep.size())
    sent, received = counts.sum(1).tolist(), arrivals.sum(1).tolist()
    rows = Mirrored.apply(x[order // CHOICES], exchange, exchange, ep, sent, received)  # ep: to the experts
    expert = torch.arange(len(up)).repeat(ep.size()).repeat_interleave(arrivals.flatten())  # (rows,): 0 0 1, 0 1, ...
    results = (torch.relu(rows[:, None] @ up[expert]) @ down[expert]).squeeze(1)
    results = Mirrored.apply(results, exchange, exchange, ep, received, sent)  # ep: and home
    return torch.zeros_like(x).index_add(0, order // CHOICES, results * best.softmax(-1).flatten()[order, None])


def run(weights: list[Tensor], samples: Tensor, targets: Tensor, pp, cp, tp, ep) -> Tensor:
    """Add up the gradients of my stage. Returns the loss of my tokens, which only the last stage knows."""
    stage, last, kept, loss = pp.rank(), pp.size() - 1, [], samples.new_zeros(())
    for sample, target in zip(samples, targets):  # step 5: micro-batches of one sequence, all forwards first
        x = part(part(sample, cp), tp)  # my tokens
        if stage > 0:
            dist.recv(x, group=pp, group_src=stage - 1)  # pp
        y = x.requires_grad_()
        for qkv, out, router, up, down in zip(*weights):
            y = y + attention(y, qkv, out, cp, tp)
            y = y + experts(y, router, up, down, ep)
        if stage < last:
            dist.send(y.detach(), group=pp, group_dst=stage + 1)  # pp
        else:
            y = (y - part(part(target, cp), tp)).square().sum() / (SEQUENCES * TOKENS * WIDTH)
            loss += y.detach()
        kept.append((x, y))
    for x, y in kept:
        dy = torch.ones_like(y)  # of the loss
        if stage < last:
            dist.recv(dy, group=pp, group_src=stage + 1)  # pp
        y.backward(dy)
        if stage > 0:
            dist.send(x.grad, group=pp, group_dst=stage - 1)  # pp
    return loss


def train(rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> tuple[list[float], list[Tensor]]:
    """Take all steps. Returns the losses, and my parts of all weights."""
    dp, pp, cp, tp, ep, dp_cp, edp = make_groups(*DEGREES[ranks])
    random = torch.Generator().manual_seed(0)
    sizes = (3, HEADS, WIDTH, HEAD), (HEADS, HEAD, WIDTH), (WIDTH, EXPERTS), (2, EXPERTS, WIDTH, WIDTH)
    drawn = [torch.randn(LAYERS, *size, generator=random, dtype=dtype) * WIDTH**-0.5 for size in sizes]
    qkv, out, router, mlps = (part(each, pp) for each in drawn)  # my layers
    qkv, out = part(qkv, tp, axis=2), part(out, tp, axis=1)  # my heads
    up, down = part(mlps, ep, axis=2).unbind(1)  # my experts
    weights = [weight.requires_grad_() for weight in (qkv, out, router, up, down)]
    samples, targets = part(torch.randn(2, SEQUENCES, TOKENS, WIDTH, generator=random, dtype=dtype), dp, axis=1)

    losses = []
    for step in range(STEPS):
        loss = run(weights, samples, targets, pp, cp, tp, ep)
        dqkv, dout, drouter, dup, ddown = (weight.grad for weight in weights)
        # --- write this yourself ---
        for gradient in (dqkv, dout, drouter):
            dist.all_reduce(gradient, group=dp_cp)  # dp: other sequences saw these weights. cp: other tokens
        dist.all_reduce(drouter, group=tp)  # each rank of tp routed its own tokens, with the same router
        for gradient in (dup, ddown):
            dist.all_reduce(gradient, group=edp)  # copies of my experts saw the tokens of other rows of ep
        # --- until here ---
        for weight in weights:
            weight.data -= LEARNING_RATE * weight.grad
            weight.grad = None
        dist.all_reduce(loss)
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step}  loss {loss:.6f}")
    return losses, weights


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)  # torchrun tells each rank its number; without it there is one
    train(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
