"""Every collective on 1 to 4 ranks, sync and async, in several types; bytes, record, link, lost ranks."""

import os
import re
from functools import partial

import pytest
import torch

from common import collectives
from common.errors import CommunicationError
from common.experiments import tcp_bytes
from common.gloo import communication_errors
from common.process_groups import Degrees, Group, Mesh, build_mesh
from tests.harness.ranks import run_ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def mesh_of(**degrees: int) -> Mesh:
    return build_mesh(Degrees(**(degrees or {"dp": int(os.environ["WORLD_SIZE"])})), torch.device("cpu"))


def operations(group: Group, **kind):
    """Each operation as (name, what issues it, a tensor, the values that it then has); `kind`: dtype and device.

    The values are small whole numbers, which every type holds exactly.
    """
    n, me, total = group.size, group.rank, sum(range(group.size))
    tensor = torch.arange(6, **kind).view(2, 3) + me
    yield "all_reduce", partial(collectives.all_reduce, tensor, group), tensor, torch.arange(6).view(2, 3) * n + total
    tensor = torch.tensor([me, -me], **kind)
    yield "all_reduce max", partial(collectives.all_reduce, tensor, group, op="max"), tensor, [n - 1, 0]
    for shape in (1, 3), (2, 3), (3,):  # of the output, whatever the shape of the input
        output = torch.full(shape, 99, **kind)
        parts = torch.arange(n * output.numel()).view(n, -1)
        input = parts.to(**kind) + me
        expected = (parts[me] * n + total).view(shape)
        yield "reduce_scatter", partial(collectives.reduce_scatter, output, input, group), output, expected
        yield "its input", lambda async_op: collectives.Work(), input, parts + me
    piece, output = torch.arange(4, **kind).view(2, 2) + 10 * me, torch.zeros(2 * n, 2, **kind)
    expected = torch.cat([torch.arange(4).view(2, 2) + 10 * rank for rank in range(n)])
    yield "all_gather", partial(collectives.all_gather, output, piece, group), output, expected
    output = torch.zeros(2 * n, 2, **kind)
    mine = output[2 * me : 2 * me + 2].copy_(piece)
    yield "all_gather in place", partial(collectives.all_gather, output, mine, group), output, expected
    input, output = torch.tensor([[10 * me + to, 7] for to in range(n)], **kind), torch.zeros(n, 2, **kind)
    expected = [[10 * rank + me, 7] for rank in range(n)]
    yield "all_to_all", partial(collectives.all_to_all, output, input, group), output, expected
    rows = [[(3 * rank + 2 * to) % 4 for to in range(n)] for rank in range(n)]  # some of them 0
    sent, got = rows[me], [rows[rank][me] for rank in range(n)]
    input = torch.tensor([10 * me + to for to in range(n) for _ in range(sent[to])], **kind)
    output = torch.zeros(sum(got), **kind)
    expected = [10 * rank + me for rank in range(n) for _ in range(got[rank])]
    yield "uneven all_to_all", partial(collectives.all_to_all, output, input, group, got, sent), output, expected
    for source in range(n):
        tensor = torch.arange(5, **kind) * (me == source)
        yield f"broadcast from {source}", partial(collectives.broadcast, tensor, source, group), tensor, range(5)
    if n == 1:
        return  # nobody to send messages to
    mine, output = torch.arange(3, **kind) + me, torch.zeros(3, **kind)
    left, right = (me - 1) % n, (me + 1) % n
    ring = partial(collectives.exchange, [(mine, right)], [(output, left)], group)
    yield "ring", ring, output, torch.arange(3) + left
    output = torch.zeros(3, **kind)
    if me == 0:
        yield "send", partial(collectives.send, mine, n - 1, group), mine, range(3)
    elif me == n - 1:
        yield "receive", partial(collectives.receive, output, 0, group), output, range(3)
    others, output = [rank for rank in range(n) if rank != me], torch.zeros(n - 1, 3, **kind)
    batch = [(mine, peer) for peer in others], list(zip(output, others, strict=True))
    expected = [[peer, peer + 1, peer + 2] for peer in others]
    yield "all pairs", partial(collectives.exchange, *batch, group), output, expected


def check_operations(group: Group, dtype: torch.dtype, device: str = "cpu") -> None:
    for async_op in False, True:
        for name, issue, tensor, expected in operations(group, dtype=dtype, device=device):
            work = issue(async_op=async_op)
            for _ in range(1 + async_op):  # a second wait must do no harm
                work.wait()
            what = f"{name}, async {async_op}, {group.name} of {group.size}, {dtype}: {tensor.tolist()}, not {expected}"
            expected = torch.as_tensor(expected, dtype=dtype, device=device)
            assert work.is_completed() and tensor.shape == expected.shape and torch.equal(tensor, expected), what
    assert collectives.all_gather_objects({"rank": group.rank}, group) == [{"rank": each} for each in range(group.size)]
    collectives.barrier(group)


def ranks_results():
    groups = [mesh_of().world]
    if groups[0].size == 4:  # and groups side by side, with neighbouring and with distant members
        mesh = mesh_of(tp=2, dp=2)
        groups += [mesh.tp, mesh.dp]
    for group in groups:
        for dtype in DTYPES:
            check_operations(group, dtype)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_operation(world):
    run_ranks(world, ranks_results)


def ranks_share_a_gpu():
    check_operations(mesh_of().world, torch.float32, "cuda:0")


@pytest.mark.gpu
def test_gloo_takes_cuda_tensors_through_the_cpu():
    run_ranks(2, ranks_share_a_gpu)


def ranks_many_in_flight():
    """Twenty collectives of two groups at a time, waited for in another order than they were issued in."""
    mesh = mesh_of(tp=2, dp=2)
    groups = [mesh.tp if index % 2 else mesh.dp for index in range(20)]
    tensors = [torch.full((1000 + index,), float(mesh.rank + index)) for index in range(20)]
    works = [collectives.all_reduce(*each, async_op=True) for each in zip(tensors, groups, strict=True)]
    for index in reversed(range(20)):
        works[index].wait()
        expected = float(sum(rank + index for rank in groups[index].ranks))
        assert torch.equal(tensors[index], torch.full((1000 + index,), expected)), f"collective {index}"


def test_many_in_flight():
    run_ranks(4, ranks_many_in_flight)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def ranks_bytes():
    """For each operation on K bytes: the model bytes counted and what this rank's sockets really sent."""
    group, elements = mesh_of().world, 1_200_000
    n, me, result = group.size, group.rank, {}
    tensor, whole, other, piece = (torch.ones(size) for size in (elements, elements, elements, elements // n))
    for name, issue in {
        "all_reduce": partial(collectives.all_reduce, tensor),
        "reduce_scatter": partial(collectives.reduce_scatter, piece, whole),
        "all_gather": partial(collectives.all_gather, whole, piece),
        "all_to_all": partial(collectives.all_to_all, other, whole),
        "broadcast": partial(collectives.broadcast, tensor, 0),
        "exchange": partial(collectives.exchange, [(whole, (me + 1) % n)], [(other, (me - 1) % n)]),
    }.items():
        issue(group)  # connections are made at the first use
        collectives.reset_bytes()
        collectives.barrier(group)
        before = tcp_bytes.sent_by_me()
        issue(group)
        collectives.barrier(group)
        measured = None if before is None else tcp_bytes.sent_by_me() - before
        collectives.barrier(group)  # a rank that ends closes sockets that others still read
        result[name] = collectives.sent_bytes["world"], measured
    return result


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes(world):
    ranks, size = run_ranks(world, ranks_bytes), 4 * 1_200_000
    share = (world - 1) * size // world
    model = {"all_reduce": 2 * share, "broadcast": size, "exchange": size}
    for name in ranks[0]:
        counted, measured = zip(*(rank[name] for rank in ranks), strict=True)
        assert counted == (model.get(name, share),) * world, name
        if measured[0] is None:
            continue
        if name == "broadcast":  # the model has every rank pass it on; the last ones of gloo's tree do not
            assert sum(measured) == pytest.approx((world - 1) * size, rel=0.01)
        else:
            assert sum(measured) == pytest.approx(sum(counted), rel=0.01), name
            assert max(measured) == pytest.approx(max(counted), rel=0.01), f"{name}: unevenly distributed"


def ranks_uneven_bytes():
    group = mesh_of().world
    sent, got = ([1, 3], [1, 5]) if group.rank == 0 else ([5, 2], [3, 2])  # rank 0 sends 3 rows away, rank 1 sends 5
    input, output = (torch.zeros(sum(rows), 4, dtype=torch.float64) for rows in (sent, got))
    empty = torch.zeros(0, 4)
    collectives.reset_bytes()
    collectives.all_to_all(output, input, group, got, sent)
    collectives.all_to_all(empty.clone(), empty, group, [0, 0], [0, 0])
    counted = dict(collectives.sent_bytes)
    collectives.reset_bytes()
    return counted, dict(collectives.sent_bytes)


def test_bytes_of_uneven_parts():
    assert run_ranks(2, ranks_uneven_bytes) == [({"world": 3 * 32}, {}), ({"world": 5 * 32}, {})]


# ---- the record ------------------------------------------------------------------------------------------------------


def ranks_record():
    mesh, launches = mesh_of(tp=2, dp=2), []
    collectives.all_reduce(torch.ones(3), mesh.world)  # not recorded
    with collectives.record(launched=lambda handle, *rest: launches.append((callable(handle.wait), *rest))) as calls:
        with collectives.record(clock=lambda: len(calls)) as first:
            collectives.all_reduce(torch.ones(8), mesh.world)
            collectives.phase = "backward"
            work = collectives.all_reduce(torch.ones(6, dtype=torch.bfloat16), mesh.dp, async_op=True)
        collectives.reduce_scatter(torch.ones(2), torch.ones(4), mesh.tp)
        collectives.all_gather(torch.ones(4), torch.ones(2), mesh.tp)
        collectives.all_to_all(torch.ones(4), torch.ones(4), mesh.tp)
        collectives.broadcast(torch.ones(5, dtype=torch.float64), 1, mesh.tp)
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
    fields = [(c.op, c.group, c.group_size, c.dtype, c.elements, c.bytes, c.phase, c.peer) for c in calls]
    in_launches = [call for _, launched, _ in launches for call in launched]
    assert all(one is other for one, other in zip(calls, in_launches, strict=True))
    return fields, [(waits, len(launched), done_at) for waits, launched, done_at in launches], mesh.tp.ranks[other]


def test_record():
    for fields, launches, peer in run_ranks(4, ranks_record):
        assert fields == [
            ("all_reduce", "world", 4, "float32", 8, 48, "setup", None),
            ("all_reduce", "dp", 2, "bfloat16", 6, 12, "backward", None),
            ("reduce_scatter", "tp", 2, "float32", 4, 8, "backward", None),
            ("all_gather", "tp", 2, "float32", 2, 8, "backward", None),
            ("all_to_all", "tp", 2, "float32", 4, 8, "backward", None),
            ("broadcast", "tp", 2, "float64", 5, 40, "backward", None),
            ("send", "tp", 2, "float32", 7, 28, "backward", peer),
            ("receive", "tp", 2, "float32", 7, 0, "backward", peer),
        ]
        assert launches == [(True, 1, 0.0)] * 6 + [(True, 2, 0.0)], "a batch of messages is one launch"


# ---- the simulated link ----------------------------------------------------------------------------------------------


# ---- lost ranks ------------------------------------------------------------------------------------------------------


def ranks_lose_a_peer(async_op: bool):
    """Rank 1 leaves without a word. Every other rank must see a CommunicationError, from whatever it calls."""
    group, tensor = mesh_of().world, torch.ones(1000)
    collectives.all_reduce(tensor, group)
    if group.rank == 1:
        return "left"
    try:
        for _ in range(20):  # the first calls may still find the connection open
            collectives.all_reduce(tensor, group, async_op=async_op).wait()
    except CommunicationError as error:
        return str(error)


@pytest.mark.parametrize("async_op", [False, True])
def test_lost_rank_is_a_communication_error_of_one_clean_line(async_op):
    first, left, last = run_ranks(3, ranks_lose_a_peer, async_op)
    assert left == "left"
    assert all("\n" not in line and ".cc" not in line and "onnection" in line for line in (first, last)), (first, last)


def ranks_wrong_size():
    group, kinds = mesh_of().world, []
    for sizes in [1, 2], [3, 3]:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            collectives.all_to_all(torch.ones(4), torch.ones(4), group, sizes, sizes)
        kinds.append(caught.type)
    return CommunicationError in kinds


def test_a_wrong_size_is_no_lost_rank():
    assert run_ranks(2, ranks_wrong_size) == [False, False]


@pytest.mark.parametrize(
    ("before", "line", "after"),
    [
        ("[../gloo/transport/tcp/pair.cc:547] ", "Connection closed by peer [127.0.0.1]:4", ". Check it.\nstack"),
        ("[/gloo/transport/tcp/pair.cc:525] ", "Read error [::1]:5: Connection reset by peer", ""),
        ("[gloo/transport/tcp/unbound_buffer.cc:81] ", "Timed out waiting 1000ms for recv operation", "\nstack"),
        ("", "NCCL error in: ProcessGroupNCCL.cpp:77, remote process exited", ""),
    ],
)
def test_errors_of_lost_ranks(before, line, after):
    with pytest.raises(CommunicationError) as caught, communication_errors():
        raise RuntimeError(before + line + after)
    assert str(caught.value) == line


@pytest.mark.parametrize("text", ["mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", "split_sizes must sum"])
def test_other_errors_stay_what_they_are(text):
    with pytest.raises(RuntimeError, match=re.escape(text)) as caught, communication_errors():
        raise RuntimeError(text)
    assert caught.type is RuntimeError
