"""Every collective on 1 to 4 ranks, sync and async, in several types; record, memory, the simulated link."""

import os
import time
import weakref
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common import collectives
from common.errors import CommunicationError, communication_errors
from common.group import Group
from common.link import Link
from common.process_groups import Degrees, Mesh, build_mesh
from tests.harness.ranks import run_ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def mesh_of(**degrees: int) -> Mesh:
    return build_mesh(Degrees(**(degrees or {"dp": int(os.environ["WORLD_SIZE"])})), torch.device("cpu"))


def operations(group: Group, **kind):
    """Each operation as (function, arguments, a tensor, its values after it); `kind`: dtype and device."""
    n, me, total = group.size, group.rank, sum(range(group.size))
    values = torch.arange(6).view(2, 3)  # small whole numbers, which every type holds exactly
    tensor = values.to(**kind) + me
    yield collectives.all_reduce, (tensor, group), tensor, values * n + total
    tensor = torch.tensor([me, -me], **kind)
    yield partial(collectives.all_reduce, op="max"), (tensor, group), tensor, [n - 1, 0]
    for shape in (1, 3), (2, 3), (3,):  # of the output, whatever the shape of the input
        output = torch.full(shape, 99, **kind)
        parts = torch.arange(n * output.numel()).view(n, -1)
        input = parts.to(**kind) + me
        expected = (parts[me] * n + total).view(shape)
        yield collectives.reduce_scatter, (output, input, group), output, expected
        assert torch.equal(input, parts.to(**kind) + me), "the input has changed"
    expected = torch.cat([values + 10 * rank for rank in range(n)])
    for in_place in False, True:
        output, piece = torch.zeros(2 * n, 3, **kind), values.to(**kind) + 10 * me
        if in_place:
            piece = output[2 * me : 2 * me + 2].copy_(piece)
        yield collectives.all_gather, (output, piece, group), output, expected
    input, output = torch.tensor([[10 * me + to, 7] for to in range(n)], **kind), torch.zeros(n, 2, **kind)
    yield collectives.all_to_all, (output, input, group), output, [[10 * rank + me, 7] for rank in range(n)]
    rows = [[(3 * rank + 2 * to) % 4 for to in range(n)] for rank in range(n)]  # some of them 0
    sent, got = rows[me], [rows[rank][me] for rank in range(n)]
    input = torch.tensor([10 * me + to for to in range(n) for _ in range(sent[to])], **kind)
    output = torch.zeros(sum(got), **kind)
    expected = [10 * rank + me for rank in range(n) for _ in range(got[rank])]
    yield collectives.all_to_all, (output, input, group, got, sent), output, expected
    mine, output = torch.arange(3, **kind) + me, torch.zeros(3, **kind)
    if 0 == me < n - 1:
        yield collectives.send, (mine, n - 1, group), mine, range(3)
    elif 0 < me == n - 1:
        yield collectives.receive, (output, 0, group), output, range(3)
    others, output = [rank for rank in range(n) if rank != me], torch.zeros(n - 1, 3, **kind)
    batch = [(mine, peer) for peer in others], list(zip(output, others, strict=True))
    yield collectives.exchange, (*batch, group), output, torch.tensor(others).view(-1, 1) + torch.arange(3)


def check_operations(group: Group, dtype: torch.dtype, device: str) -> None:
    for async_op in False, True:
        for function, arguments, tensor, expected in operations(group, dtype=dtype, device=device):
            work = function(*arguments, async_op=async_op)
            work.wait()  # if not async, for the second time, which must do no harm
            what = f"{function}, async {async_op}, {group.name} of {group.size}, {dtype}: {tensor}, not {expected}"
            expected = torch.as_tensor(expected, dtype=dtype, device=device)
            assert work.is_completed() and tensor.shape == expected.shape and torch.equal(tensor, expected), what
    assert collectives.all_gather_objects({"rank": group.rank}, group) == [{"rank": each} for each in range(group.size)]
    collectives.barrier(group)


def check_messages(group: Group) -> None:
    """On gloo: in which order messages are issued, and that nothing stays behind them."""
    issued, n, me = [], group.size, group.rank

    def noted(op, tensor, peer, **named):
        issued.append((op, tensor, peer))
        return op(tensor, peer, **named)

    in_order = [(op, group.ranks[(me + step) % n]) for op in (dist.irecv, dist.isend) for step in range(1, n)]
    whole, part = torch.ones(n, 8), torch.ones(8)
    patches = {op.__name__: partial(noted, op) for op in (dist.irecv, dist.isend)}
    for function, *tensors in (
        (collectives.reduce_scatter, part, whole),
        (collectives.all_gather, whole, part),
        (collectives.all_to_all, whole, whole.clone()),
    ):
        issued.clear()
        with mock.patch.multiple(dist, **patches):
            function(*tensors, group)
        assert [(op, peer) for op, _, peer in issued] == in_order, f"{function.__name__}: {issued}"
        left = sum(tensor.untyped_storage().nbytes() for op, tensor, _ in issued if op is dist.irecv)
        assert left == 0 or function is not collectives.reduce_scatter, "the parts that were added up are still there"
    issued.clear()
    with mock.patch.multiple(dist, **patches), collectives.record():
        collectives.exchange([(whole, (me + 1) % n)], [(whole.clone(), (me - 1) % n)], group)
    assert [op for op, *_ in issued] == [dist.irecv, dist.isend], "a receive comes after a send"


def ranks_results(device: str) -> None:
    groups = [mesh_of().world]
    if groups[0].size == 4:  # and groups side by side, with neighbouring and with distant members
        mesh = mesh_of(tp=2, dp=2)
        groups += [mesh.tp, mesh.dp]
    for group in groups:
        for dtype in DTYPES if device == "cpu" else DTYPES[:1]:
            check_operations(group, dtype, device)
        if group.size > 1 and device == "cpu":
            check_messages(group)
    if groups[0].size == 2:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            collectives.all_to_all(torch.ones(4), torch.ones(4), groups[0], [1, 2], [1, 2])
        assert caught.type is not CommunicationError, "a wrong size is no lost rank"


ON_A_GPU = pytest.param(2, "cuda:0", marks=pytest.mark.gpu)  # gloo takes CUDA tensors through the CPU


@pytest.mark.parametrize(("world", "device"), [(1, "cpu"), (2, "cpu"), (3, "cpu"), (4, "cpu"), ON_A_GPU])
def test_every_operation(world, device):
    run_ranks(world, ranks_results, device)


def test_a_work_keeps_its_tensors_until_the_wait_and_no_longer():
    """On NCCL nobody else does."""
    work, tensors, handle = collectives.Work(), [torch.ones(2), torch.ones(2)], mock.Mock()
    kept = [weakref.ref(each) for each in tensors]
    work.launch(lambda tensor: handle, tensors[0])
    work.afterwards(lambda tensor: None, tensors[1])
    tensors.clear()
    assert None not in [each() for each in kept], "freed before the wait"
    work.wait()
    assert [each() for each in kept] == [None] * 2, "kept after the wait"


@pytest.mark.parametrize(
    ("before", "line", "after"),
    [
        ("[../gloo/transport/tcp/pair.cc:547] ", "Connection closed by peer [127.0.0.1]:4", ". Check it.\nstack"),
        ("[/gloo/transport/tcp/pair.cc:525] ", "Read error [::1]:5: Connection reset by peer", ""),
        ("[gloo/transport/tcp/unbound_buffer.cc:81] ", "Timed out waiting 1000ms for recv operation", "\nstack"),
        ("", "NCCL error in: ProcessGroupNCCL.cpp:77, remote process exited", ""),
        ("", "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", None),  # None: it stays as it is
    ],
)
def test_errors_of_lost_ranks_and_others(before, line, after):
    with pytest.raises(RuntimeError) as caught, communication_errors():
        raise RuntimeError(before + line + (after or ""))
    assert str(caught.value) == line and caught.type is (RuntimeError if after is None else CommunicationError)


def ranks_link() -> dict[str, tuple[float, float]]:
    """By operation the seconds that a link must take, and that it took. Only sleep moves the clock."""
    alpha, bandwidth, now, result = 0.02, 10e6, [100.0], {}
    mesh = mesh_of(tp=2, dp=2).with_link(Link(alpha, bandwidth))
    world, tp, dp, peer = mesh.world, mesh.tp, mesh.dp, 1 - mesh.tp.rank
    tensor, other, quarter = torch.ones(100_000), torch.ones(100_000), torch.ones(25_000)
    transfer = 4 * len(tensor) / bandwidth
    small, large = (quarter, tensor) if tp.rank else (tensor, quarter)  # what this rank sends, and what it receives
    one_way = partial(collectives.receive, other, 0) if tp.rank else partial(collectives.send, tensor, 1)

    def all_reduces(*groups: Group) -> None:
        works = [collectives.all_reduce(tensor.clone(), group, async_op=True) for group in groups]
        while not all(handle.is_completed() for work in works for handle in work._handles):
            os.sched_yield()
        assert not any(work.is_completed() for work in works), "the link still works on it"
        for work in works:
            work.wait()
            assert work.is_completed()

    # Over N ranks an all-reduce is 2(N-1) messages one after another, with 2(N-1)/N of the bytes
    on_tp = 2 * alpha + transfer
    cases = [
        ("all_reduce", 6 * alpha + 1.5 * transfer, lambda: collectives.all_reduce(tensor.clone(), world)),
        ("reduce_scatter", 3 * alpha + 0.75 * transfer, lambda: collectives.reduce_scatter(quarter, tensor, world)),
        ("all_gather", 3 * alpha + 0.75 * transfer, lambda: collectives.all_gather(other, quarter, world)),
        ("all_to_all", 3 * alpha + 0.75 * transfer, lambda: collectives.all_to_all(other, tensor, world)),
        ("to and fro", alpha + transfer, lambda: collectives.exchange([(small, peer)], [(large.clone(), peer)], tp)),
        ("one way", alpha + transfer, lambda: one_way(tp)),
        ("one group", 2 * on_tp, lambda: all_reduces(tp, tp)),
        ("two groups", on_tp, lambda: all_reduces(tp, dp)),
        ("one rank", 0.0, lambda: collectives.all_reduce(tensor, mesh.cp)),
    ]
    clock = {"perf_counter": lambda: now[0], "sleep": lambda seconds: now.__setitem__(0, now[0] + seconds)}
    with mock.patch.multiple(time, **clock):
        for name, least, issue in cases:
            start = now[0]
            issue()
            result[name] = least, now[0] - start
    return result


def test_link_takes_its_time():
    for rank, found in enumerate(run_ranks(4, ranks_link)):
        for name, (least, taken) in found.items():
            assert taken == pytest.approx(least, rel=1e-9), f"{name}, rank {rank}"
