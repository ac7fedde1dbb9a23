"""A file that reads what solves or grades its lab is rejected, by whatever way it reads it; others may read files."""

import pytest

from common.labs import closed
from common.labs.find import ROOT, all_labs
from tests.labs.test_write import ALL, hand_in

LAB = all_labs()["write-05-b"]
SOURCE = ROOT / LAB.source
MODULE = LAB.source.removesuffix(".py").replace("/", ".")
PACKAGE = MODULE.rpartition(".")[0]
BODY = '    return [expand_pattern((m, "F"), (m, "B"), micro_batches=m) for _ in range(p)]\n'
REFERENCE, GRADER, NAMES, PROCESS = closed.REFERENCE, closed.LAB, closed.NAMES, "your file starts a process"
WAYS = {  # to get at the reference, in the place of a body
    "open": (f"exec(open('{SOURCE}').read())", REFERENCE),
    "open by a folder": (f"import os; os.open('{SOURCE.name}', 0, dir_fd=os.open('{SOURCE.parent}', 0))", REFERENCE),
    "open a link": (f"import os; os.symlink('{SOURCE}', '/tmp/a link to a sketch.txt')", "calls os.symlink"),
    "read_text": (f"import pathlib; pathlib.Path('{SOURCE}').read_text()", REFERENCE),
    "import": (f"from {MODULE} import all_forward_all_backward as ours; return ours(p, m, v)", REFERENCE),
    "importlib": (f"import importlib; importlib.import_module('{MODULE}')", REFERENCE),
    "import once more": (f"import sys, importlib; del sys.modules['{MODULE}']; import {MODULE}", REFERENCE),
    "a loader": (
        f"import importlib.util as u; s = u.spec_from_file_location('x', '{SOURCE}'); "
        "s.loader.exec_module(u.module_from_spec(s))",
        REFERENCE,
    ),
    "compiled": (f"import importlib.util as u; open(u.cache_from_source('{SOURCE}'), 'rb')", REFERENCE),
    "inspect": (
        f"import inspect, {PACKAGE} as s; inspect.getsource(s.whole_backward)",
        "no attribute",
    ),
    "another module": (
        f"from {PACKAGE}.catalogue import build_schedule; return build_schedule('afab', p, m).actions",
        REFERENCE,
    ),
    "subprocess": (f"import subprocess; exec(subprocess.check_output(['cat', '{SOURCE}']))", PROCESS),
    "system": (f"import os; os.system('cp {SOURCE} /tmp')", PROCESS),
    "git": ("import os; os.popen('git show HEAD')", PROCESS),
    "fork": ("import os; os.fork()", PROCESS),
    "multiprocessing": ("import multiprocessing as m; m.get_context('spawn').Process(target=print).start()", "process"),
    "ctypes": (f"import ctypes; ctypes.CDLL(None).open(b'{SOURCE}', 0)", "calls ctypes.dlopen"),
    "mapped": (f"import torch; torch.from_file('{SOURCE}', size=10, dtype=torch.uint8)", "maps a file into memory"),
    "mmap": (f"import mmap; mmap.mmap(open('{SOURCE}').fileno(), 0)", REFERENCE),
    "hidden in an exception": (
        f"\n    try:\n        open('{SOURCE}')\n    except BaseException:\n        pass",
        REFERENCE,
    ),
    "hidden in a finally": (
        f"\n    try:\n        return open('{SOURCE}').read()\n    finally:\n        return [[]]",
        REFERENCE,
    ),
    "the lab": ("from step05_pipeline.labs.write_05 import expect_plan; expect_plan(p)", GRADER),
    "the list of labs": ("from common.labs.find import lab; lab('write-05-b').solution(1)", "your file"),
    "the answers of our tests": (f"open('{ROOT}/tests/labs/test_write.py')", GRADER),
    "frames": ("import sys; sys._getframe(1).f_locals['case']", "looks at the frames"),
    "frames by inspect": ("import inspect; inspect.currentframe().f_back", "looks at the frames"),
    "frames by a traceback": (
        "\n    try:\n        1 / 0\n    except ZeroDivisionError as e:\n        e.__traceback__.tb_frame.f_back",
        "looks at the frames",
    ),
    "frames by the traceback module": (
        "import traceback\n    try:\n        1 / 0\n    except ZeroDivisionError as e:\n"
        "        list(traceback.walk_tb(e.__traceback__))",
        "looks at the frames",
    ),
    "frames by a generator": ("g = (0 for _ in ()); g.gi_frame", "looks at the frames"),
    "frames of a thread": ("import sys; sys._current_frames()", "looks at the frames"),
    "frames by tracing": ("import sys; sys.settrace(print)", "looks at the frames"),
    "code of another name": (
        "f = all_forward_all_backward; f.__code__ = f.__code__.replace(co_filename='x')",
        "another file",
    ),
    "code from an old one": ("(lambda: 0).__code__.replace(co_name='x')", "another file"),
    "compiled as another file": (f"exec(compile('import sys; sys._getframe(1)', '{closed.__file__}', 'exec'))", NAMES),
    "code made from text": ("exec('import sys; sys._getframe(2).f_locals')", "looks at the frames"),
    "what refuses": ("import sys; sys.modules['common.labs.closed'].refuse = print", GRADER),
    "what is recorded": ("from common.labs import ranks; ranks.write_result = print", GRADER),
    "what others write": (
        "import glob, tempfile; open(glob.glob(f'{tempfile.gettempdir()}/labs-*/world.0')[0])",
        "|".join((closed.RESULTS, "index out of range")),  # under a TMPDIR of its own
    ),
    "the store": ("import torch.distributed as d; d.distributed_c10d._get_default_store().get('x')", closed.STORE),
    "a socket": ("import socket; socket.create_connection(('127.0.0.1', 9))", "calls socket.connect"),
    "memory": ("open('/proc/self/mem', 'rb')", closed.OTHERS),
    "a thread": (
        f"import pathlib, threading; t = threading.Thread(target=pathlib.Path('{SOURCE}').read_text); t.start(); "
        "t.join()",
        REFERENCE,
    ),
    "a pool of threads": (
        "from concurrent.futures import ThreadPoolExecutor as P; import pathlib\n"
        f"    with P(1) as pool: pool.submit(pathlib.Path('{SOURCE}').read_text)",
        REFERENCE,
    ),
}

QUICK = "open", "another module", "subprocess", "frames by a traceback", "code of another name", "what is recorded"


@pytest.mark.parametrize("way", WAYS if ALL else QUICK)
def test_ways_to_the_reference(way, tmp_path):
    """Once with our body behind it: what is right is rejected, too."""
    code, said = WAYS[way]
    verdict = hand_in(LAB, tmp_path, [(BODY, f"    {code}\n{BODY}")])
    assert verdict.score == 0 and any(part in verdict.feedback[0] for part in said.split("|")), verdict.feedback


def test_given_gives_what_its_lab_gives(tmp_path):
    """06-b's starter has `block` and `forward` from us; for `backward` the same decorator is refused."""
    lab = all_labs()["write-06-b"]
    lab.start(tmp_path, 1)
    file = tmp_path / "sketch.py"
    text = file.read_text()
    assert text.count("@given(") == 2
    line = next(line for line in text.splitlines() if line.startswith("@given("))
    file.write_text(text.replace("def backward(", f"{line}\ndef backward("))
    assert lab.check(tmp_path, 1).feedback[0].endswith(closed.REFERENCE)


def test_code_made_from_text_is_noted(tmp_path):
    """A file that hands its function to `exec` has its communication counted all the same."""
    lab, source = all_labs()["write-03-a"], (ROOT / "step03_zero/sketch.py").read_text()
    lab.start(tmp_path, 1)
    body = source.partition("def train_step")[2].partition("\ndef train(")[0]
    code = "def train_step" + body.replace("    error =", "    dist.all_reduce(torch.ones(10_000))\n    error =", 1)
    file = tmp_path / "sketch.py"
    file.write_text(f"{file.read_text().partition('def train_step')[0]}\nexec({code!r})\n")
    found = lab.check(tmp_path, 1)
    assert found.score == 0.75 and "bytes" in str(found.feedback), found.feedback


ALLOWED = [
    "open(__file__).read()",
    "from step05_pipeline.schedules.validator import check_schedule",
    "__import__('json').dumps({})",
    "import tempfile; tempfile.TemporaryFile().close()",
    "import numpy, logging; logging.getLogger('x').debug('y')",
    "import warnings; warnings.warn('what else')",
    "import inspect; inspect.signature(print)",
    "import traceback\n    try:\n        1 / 0\n    except ZeroDivisionError:\n        traceback.format_exc()",
    f"import threading, pathlib; t = threading.Thread(target=pathlib.Path('{ROOT}/Makefile').read_text); t.start()",
]


@pytest.mark.parametrize("code", ALLOWED if ALL else ALLOWED[:2])
def test_what_is_allowed(code, tmp_path):
    verdict = hand_in(LAB, tmp_path, [(BODY, f"    {code}\n{BODY}")])
    assert verdict.passed, verdict.feedback
