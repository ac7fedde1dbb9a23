"""The lab that counts in a GPU's trace: right and wrong forwards on a virtual GPU, made-up traces, and a real GPU."""

import json
import textwrap

import pytest
import torch

from common.errors import UsageError
from common.labs.cut import bodies_of, starter
from common.labs.find import ROOT, all_labs
from step08_5d.labs import profiled
from step08_5d.labs.overlap import faults
from tests.labs.virtual_gpu import VirtualGPU

LAB = all_labs()["gpu-08-a"]
SOURCE = (ROOT / LAB.source).read_text(encoding="utf-8")
(OURS,) = bodies_of(SOURCE)
EVENTS = """
computing, copying = torch.cuda.current_stream(), torch.cuda.Stream()
used = torch.cuda.Event()
def borrow(layer):
    with torch.cuda.stream(copying):
        return host[layer].to(x.device, copy=True, non_blocking=True), copying.record_event()
"""
TWO_AT_ONCE = """
matrix, arrived = borrow(0)
for layer in range(len(host)):
    computing.wait_event(arrived)
    copying.wait_event(used)
    this, (matrix, arrived) = matrix, borrow(layer + 1) if layer + 1 < len(host) else (None, None)
    x = torch.relu(x @ this)
    used.record(computing)
return x
"""
RIGHT = {
    "ours": OURS,
    "one event, and a matrix of its own each time": EVENTS + TWO_AT_ONCE,
    "streams wait for streams": """
        copying = torch.cuda.Stream()
        with torch.cuda.stream(copying):
            ready = host[0].to(x.device, copy=True, non_blocking=True)
        for layer in range(len(host)):
            torch.cuda.current_stream().wait_stream(copying)
            copying.wait_stream(torch.cuda.current_stream())
            now = ready
            if layer + 1 < len(host):
                with torch.cuda.stream(copying):
                    ready = host[layer + 1].to(x.device, copy=True, non_blocking=True)
            x = torch.relu(x @ now)
        return x
    """,
    "products have the stream of their own": """
        copying, computing = torch.cuda.current_stream(), torch.cuda.Stream()
        computing.wait_stream(copying)
        ready = host[0].to(x.device, copy=True, non_blocking=True)
        for layer in range(len(host)):
            computing.wait_stream(copying)
            now = ready
            copying.wait_stream(computing)
            if layer + 1 < len(host):
                ready = host[layer + 1].to(x.device, copy=True, non_blocking=True)
            with torch.cuda.stream(computing):
                x = torch.relu(x @ now)
        copying.wait_stream(computing)
        return x
    """,
}
PREFETCH = "    if layer + 1 < len(host):\n        borrow(layer + 1)  # it travels during the next two lines\n"
USED = "    used[layer].record(computing)\n"


def changed(old: str, new: str) -> str:
    assert OURS.count(old) == 1, old
    return OURS.replace(old, new)


WRONG = {  # the body, and a part of what is said about it
    "one stream": (
        "for matrix in host:\n    x = torch.relu(x @ matrix.to(x.device, copy=True, non_blocking=True))\nreturn x",
        "a stream does one thing after another",
    ),
    "the copy after the product": (
        changed(PREFETCH, "").replace(USED, f"{USED}    copying.wait_stream(computing)\n{PREFETCH}"),
        "11 of the last 11 copies ran while no kernel ran. They have a stream of their own",
    ),
    "the copy waited for at once": (
        changed(PREFETCH, "    torch.cuda.synchronize()\n" + PREFETCH + "    torch.cuda.synchronize()\n"),
        "started too late, or waited for at once",
    ),
    "no event of the copy": (changed("computing.wait_event(arrived[layer])", "pass"), "before its matrix had arrived"),
    "no event of the product": (changed("copying.wait_event(used[layer - 2])", "pass"), "overwritten in use"),
    "all at once": (
        "matrices = [matrix.to(x.device, copy=True, non_blocking=True) for matrix in host]\n"
        "for matrix in matrices:\n    x = torch.relu(x @ matrix)\nreturn x",
        "ran while no kernel ran",
    ),
    "kept from one forward to the next": (
        "global kept\nkept = globals().get('kept') or [matrix.to(x.device, copy=True) for matrix in host]\n"
        "for matrix in kept:\n    x = torch.relu(x @ matrix)\nreturn x",
        "0 copies of a matrix",
    ),
    "no ReLU": (changed("torch.relu(x @ buffers[layer % 2])", "x @ buffers[layer % 2]"), "differs from ours"),
    "a line that raises": (changed("borrow(0)", "borrow(99)"), "IndexError in line"),
    "not written": ("raise NotImplementedError", "`forward` is not written yet (line "),
    "nothing": ("return None", "should return a tensor of shape"),
}


def written(folder, body: str):
    """The student's file with this body."""
    text = starter(SOURCE, (1,), path=LAB.source)
    body = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    (folder / "borrowed.py").write_text(text.replace("    raise NotImplementedError", body), encoding="utf-8")
    return folder / "borrowed.py"


def check(folder, monkeypatch, body: str, copy: float = 100.0):
    """The verdict on a trace that a virtual GPU has made, read on a machine without one; or what was refused."""
    with monkeypatch.context() as patched:
        VirtualGPU(copy).stand_in(patched)
        for name, value in {"DEVICE": "cpu", "WIDTH": 8, "TOKENS": 16}.items():
            patched.setattr(profiled, name, value)
        try:
            profiled.write_trace(written(folder, body))
        except UsageError as error:
            return error
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return LAB.check(folder, 1)


@pytest.mark.parametrize("copy", [20.0, 100.0, 400.0], ids="copies take {:.0f} us".format)
@pytest.mark.parametrize("name", RIGHT)
def test_right(name, copy, tmp_path, monkeypatch):
    """Also where the bus is slow, and copies can hide in part only."""
    verdict = check(tmp_path, monkeypatch, RIGHT[name], copy)
    assert verdict.passed, verdict
    assert verdict.feedback == ("a virtual GPU: 11 of 12 copies ran while a kernel ran.",)


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name, tmp_path, monkeypatch):
    body, message = WRONG[name]
    found = check(tmp_path, monkeypatch, body)
    assert message in (str(found) if isinstance(found, UsageError) else "\n".join(found.feedback)), found
    assert isinstance(found, UsageError) or found.score < 1


def test_without_a_gpu_it_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = written(tmp_path, OURS)
    with pytest.raises(UsageError, match="^gpu-08-a needs a GPU: run `python -m step08_5d.labs.profiled FILE`"):
        LAB.check(tmp_path, 1)
    assert profiled.main([str(file)]) == 2 and capsys.readouterr().err.count("\n") == 1
    for trace, message in (("{", "is no trace"), ("{}", "is no trace"), ("[1]", "is no trace")):
        (tmp_path / "trace.json").write_text(trace)
        with pytest.raises(UsageError, match=message):
            LAB.check(tmp_path, 1)
    (tmp_path / "trace.json").write_text(json.dumps(made_up([(0, 1)], [(1, 2)])))
    with pytest.raises(UsageError, match="of another borrowed.py"):
        LAB.check(tmp_path, 1)


def made_up(copies: list[tuple], kernels: list[tuple], kind="Pinned", peak=0) -> dict:
    """A trace with copies and kernels at these times, one kernel for each layer."""
    parts = [("gpu_memcpy", f"Memcpy HtoD ({kind} -> Device)", 20, copies), ("kernel", "gemm", 7, kernels)]
    events = [
        {
            "ph": "X",
            "cat": category,
            "name": name,
            "ts": start,
            "dur": end - start,
            "args": {"stream": stream, "bytes": 8},
        }
        for category, name, stream, spans in parts
        for start, end in spans
    ]
    events += [{"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 0, "dur": 9, "args": {"bytes": 8}}]
    events += [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9}, {"ph": "M", "name": "process_name"}]
    lab = {
        "file": "",
        "device": "",
        "layers": len(kernels),
        "matrix": 8,
        "activation": 8,
        "peak": peak,
        "difference": 0,
    }
    return {"traceEvents": events, "lab": lab}


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (made_up([(0, 2), (2, 5), (5, 8)], [(2, 5), (5, 9), (9, 12)]), None),
        (made_up([(0, 2), (2, 9), (9, 16)], [(2, 5), (9, 12), (16, 19)]), None),  # a slow bus
        (made_up([(0, 2), (5, 7), (10, 12)], [(2, 5), (7, 10), (12, 15)]), "2 of the last 2 copies"),
        (made_up([(0, 2), (2, 4), (9, 11)], [(2, 5), (5, 9), (11, 12)]), "1 of the last 2 copies"),
        (made_up([(0, 2), (2, 5)], [(2, 5), (5, 9), (9, 12)]), "2 copies of a matrix"),
        (made_up([(0, 2), (2, 6), (6, 8)], [(2, 5), (5, 9), (9, 12)]), "layer 1 began before"),
        (made_up([(0, 2), (2, 4), (4, 8)], [(2, 5), (5, 9), (9, 12)]), "the copy of matrix 2 began"),
        (made_up([(0, 2), (2, 5), (5, 8)], [(2, 5), (5, 9), (9, 12)], kind="Pageable"), "not pinned"),
        (made_up([(0, 2), (2, 5), (5, 8)], [(2, 5), (5, 9), (9, 12)], peak=80), "run ahead"),
    ],
)
def test_made_up_traces(trace, message):
    found = list(faults(trace))
    assert len(found) == (message is not None) and (not found or message in found[0]), found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ours", "streams wait for streams", "one stream"])
def test_on_a_gpu(name, tmp_path):
    written(tmp_path, RIGHT[name] if name in RIGHT else WRONG[name][0])
    verdict = LAB.check(tmp_path, 1)
    assert verdict.passed == (name in RIGHT), verdict
