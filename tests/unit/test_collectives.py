"""Every collective on 1 to 4 ranks, sync and async, in several types; bytes, record, memory, lost ranks."""

import contextlib
import os
import weakref
from dataclasses import astuple
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common import collectives, gloo
from common.errors import CommunicationError, communication_errors
from common.experiments import tcp_bytes
from common.process_groups import Degrees, Group, Mesh, build_mesh
from tests.harness.ranks import run_ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def mesh_of(**degrees: int) -> Mesh:
    return build_mesh(Degrees(**(degrees or {"dp": int(os.environ["WORLD_SIZE"])})), torch.device("cpu"))


def operations(group: Group, **kind):
    """Each operation as (function, arguments, a tensor, the values that it then has); `kind`: dtype and device."""
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

    def noted_batch(batch):
        issued.extend((each.op, each.tensor, each.peer) for each in batch)
        return batch_isend_irecv(batch)

    batch_isend_irecv, after = dist.batch_isend_irecv, [group.ranks[(me + step) % n] for step in range(1, n)]
    in_order = [(op, peer) for op in (dist.irecv, dist.isend) for peer in after]
    whole, part = torch.ones(n, 8), torch.ones(8)
    patches = {op.__name__: partial(noted, op) for op in (dist.irecv, dist.isend)}
    for function, arguments in (
        (collectives.reduce_scatter, (part, whole)),
        (collectives.all_gather, (whole, part)),
        (collectives.all_to_all, (whole, whole.clone())),
    ):
        issued.clear()
        with mock.patch.multiple(dist, **patches):
            function(*arguments, group)
        assert [(op, peer) for op, _, peer in issued] == in_order, f"{function.__name__}: {issued}"
        if function is collectives.reduce_scatter:
            left = {tensor.untyped_storage().nbytes() for op, tensor, _ in issued if op is dist.irecv}
            assert left == {0}, "the parts that were added up are still there"
    there, back = [(whole, (me + 1) % n)], [(whole.clone(), (me - 1) % n)]
    for recorded, replaced in ((False, {"batch_isend_irecv": noted_batch}), (True, patches)):
        issued.clear()
        with mock.patch.multiple(dist, **replaced), collectives.record() if recorded else contextlib.nullcontext():
            collectives.exchange(there, back, group)
        assert [op for op, *_ in issued] == [dist.irecv, dist.isend], "a receive comes after a send"
    arriving = gloo.Messages([(dist.irecv, part, after[0])], group)
    assert not arriving.is_completed(), "nobody has sent it"
    collectives.barrier(group)
    dist.send(torch.ones(8), after[-1], group=group.handle)
    arriving.wait()


def ranks_results(device: str) -> dict | None:
    """Checks every operation. Returns `sent_and_counted` on the CPU."""
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
    return sent_and_counted(groups[0]) if groups[0].size > 1 and device == "cpu" else None


ON_A_GPU = pytest.param(2, "cuda:0", marks=pytest.mark.gpu)  # gloo takes CUDA tensors through the CPU


@pytest.mark.parametrize(("world", "device"), [(1, "cpu"), (2, "cpu"), (3, "cpu"), (4, "cpu"), ON_A_GPU])
def test_every_operation(world, device):
    """Results, and bytes: those that our model counts are what goes through the sockets."""
    ranks, size = run_ranks(world, ranks_results, device), 4 * ELEMENTS
    share = (world - 1) * size // world
    model = {"all_reduce": 2 * share, "exchange": size}
    for name in ranks[0] or ():
        counted, measured = zip(*(rank[name] for rank in ranks), strict=True)
        assert counted == (model.get(name, share),) * world, name
        if measured[0] is None:
            continue
        assert sum(measured) == pytest.approx(sum(counted), rel=0.01), name
        assert max(measured) == pytest.approx(max(counted), rel=0.01), f"{name}: unevenly distributed"


ELEMENTS = 1_200_000


def sent_and_counted(group: Group) -> dict:
    """For each operation on K bytes: the model bytes counted and what this rank's sockets really sent."""
    n, me, result, elements = group.size, group.rank, {}, ELEMENTS
    tensor, whole, other, piece = (torch.ones(size) for size in (elements, elements, elements, elements // n))
    for name, issue in {
        "all_reduce": partial(collectives.all_reduce, tensor),
        "reduce_scatter": partial(collectives.reduce_scatter, piece, whole),
        "all_gather": partial(collectives.all_gather, whole, piece),
        "all_to_all": partial(collectives.all_to_all, other, whole),
        "exchange": partial(collectives.exchange, [(whole, (me + 1) % n)], [(other, (me - 1) % n)]),
    }.items():
        issue(group)  # connections are made at the first use
        collectives.sent_bytes.clear()
        collectives.barrier(group)
        before = tcp_bytes.sent_by_me()
        issue(group)
        collectives.barrier(group)
        measured = None if before is None else tcp_bytes.sent_by_me() - before
        collectives.barrier(group)  # a rank that ends closes sockets that others still read
        result[name] = collectives.sent_bytes["world"], measured
    return result


def ranks_record():
    mesh, launches = mesh_of(tp=2, dp=2), []
    with collectives.record(launched=lambda *launch: launches.append(launch)) as calls:
        with collectives.record(clock=lambda: len(calls)) as first:
            collectives.all_reduce(torch.ones(8), mesh.world)
            collectives.phase = "backward"
            work = collectives.all_reduce(torch.ones(6, dtype=torch.bfloat16), mesh.dp, async_op=True)
        collectives.reduce_scatter(torch.ones(2), torch.ones(4), mesh.tp)
        collectives.all_gather(torch.ones(4), torch.ones(2), mesh.tp)
        sent, got = ([1, 3], [1, 5]) if mesh.tp.rank == 0 else ([5, 2], [3, 2])  # rows; rank 1 of tp sends 5 away
        collectives.all_to_all(torch.ones(sum(got), 4), torch.ones(sum(sent), 4), mesh.tp, got, sent)
        collectives.all_to_all(torch.ones(0, 4), torch.ones(0, 4), mesh.tp, [0, 0], [0, 0])
        other = 1 - mesh.tp.rank
        collectives.exchange([(torch.ones(7), other)], [(torch.ones(7), other)], mesh.tp)
        collectives.all_reduce(torch.ones(3), mesh.cp)  # one rank: nothing
    collectives.phase = "setup"
    collectives.all_reduce(torch.ones(3), mesh.world)  # not recorded
    work.wait()
    for call in calls:
        times = [call.issue, call.wait_start, call.wait_end]
        assert times == sorted(times) and call.completion == call.wait_end, f"{call.op}: {times}"
    assert calls[1].wait_start > calls[-1].wait_end, "it was waited for last"
    assert [(call.op, call.issue, call.wait_end) for call in first] == [("all_reduce", 1, 1), ("all_reduce", 2, 8)]
    assert sum((launched for _, launched, _ in launches), []) == calls
    launches = [([callable(each.wait) for each in handles], len(calls), at) for handles, calls, at in launches]
    return [astuple(call)[:8] for call in calls], launches


def test_record():
    for rank, (fields, launches) in enumerate(run_ranks(4, ranks_record)):
        rows, sent, peer = [(4, 3, rank + 1), (7, 5, rank - 1)][rank % 2]
        assert fields == [
            ("all_reduce", "world", 4, "float32", 8, 48, "setup", None),
            ("all_reduce", "dp", 2, "bfloat16", 6, 12, "backward", None),
            ("reduce_scatter", "tp", 2, "float32", 4, 8, "backward", None),
            ("all_gather", "tp", 2, "float32", 2, 8, "backward", None),
            ("all_to_all", "tp", 2, "float32", 4 * rows, 16 * sent, "backward", None),
            ("all_to_all", "tp", 2, "float32", 0, 0, "backward", None),
            ("send", "tp", 2, "float32", 7, 28, "backward", peer),
            ("receive", "tp", 2, "float32", 7, 0, "backward", peer),
        ]
        assert launches == [([True], 1, 0.0)] * 6 + [([True, True], 2, 0.0)], "a batch of messages is one launch"


def test_a_work_keeps_its_tensors_until_the_wait_and_no_longer():
    """On NCCL nobody else does."""

    class Handle:
        arrived = False

        def is_completed(self):
            return self.arrived

        def wait(self):
            self.arrived = True

    work, tensors, handles = collectives.Work(), [torch.ones(2), torch.ones(2)], [Handle()]
    kept = [weakref.ref(each) for each in (*tensors, *handles)]
    work.launch(lambda tensor: handles.pop(), tensors[0])
    work.afterwards(lambda tensor: None, tensors[1])
    tensors.clear()
    assert None not in [each() for each in kept], "freed before the wait"
    assert not work.is_completed(), "its message is still on the way"
    work.wait()
    assert [each() for each in kept] == [None] * 3, "kept after the wait"


def ranks_lose_a_peer(async_op: bool):
    """Rank 1 leaves without a word. Every other rank must see a CommunicationError, from whatever it calls."""
    group, tensor = mesh_of().world, torch.ones(1000)
    collectives.all_reduce(tensor, group)
    if group.rank == 1:
        return None
    try:
        for _ in range(20):  # the first calls may still find the connection open
            collectives.all_reduce(tensor, group, async_op=async_op).wait()
    except CommunicationError as error:
        return str(error)


@pytest.mark.parametrize("async_op", [False, True])
def test_lost_rank_is_a_communication_error_of_one_clean_line(async_op):
    first, _, last = run_ranks(3, ranks_lose_a_peer, async_op)
    assert all("\n" not in line and ".cc" not in line and "onnection" in line for line in (first, last)), (first, last)


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
