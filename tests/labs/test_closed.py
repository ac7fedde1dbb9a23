"""A file that reads what solves or grades its lab is rejected, by whatever way it reads it; others may read files."""

import pytest

from common.labs import closed, uncounted
from common.labs.find import ROOT, all_labs
from tests.labs.test_write import ALL, hand_in

LAB = all_labs()["write-05-b"]
SOURCE = ROOT / LAB.source
MODULE = LAB.source.removesuffix(".py").replace("/", ".")
PACKAGE = MODULE.rpartition(".")[0]
BODY = '    return [expand_pattern((m, "F"), (m, "B"), micro_batches=m) for _ in range(p)]\n'
MODES = "__import__('torch').utils._python_dispatch"
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
    "mapped": (f"import torch; torch.from_file('{SOURCE}', size=10, dtype=torch.uint8)", uncounted.SHARED),
    "mapped by an operator": (f"import torch; torch.ops.aten.from_file('{SOURCE}', False, 10)", uncounted.SHARED),
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
    "the store": ("import torch.distributed as d; d.distributed_c10d._get_default_store().get('x')", uncounted.STORE),
    "a socket": ("import socket; socket.create_connection(('127.0.0.1', 9))", "calls socket.connect"),
    "memory": ("open('/proc/self/mem', 'rb')", closed.OTHERS),
    "a thread": (
        f"import pathlib, threading; t = threading.Thread(target=pathlib.Path('{SOURCE}').read_text); t.start(); "
        "t.join()",
        closed.THREAD,
    ),
    "a thread by its own function": ("import _thread; _thread.start_new_thread(print, ())", closed.THREAD),
    "a pool of threads": (
        "from concurrent.futures import ThreadPoolExecutor as P; import pathlib\n"
        f"    with P(1) as pool: pool.submit(pathlib.Path('{SOURCE}').read_text)",
        closed.THREAD,
    ),
    "all objects": ("import gc; gc.get_objects()", "calls gc.get_objects"),
    "a thread of gloo": (
        "import torch, torch.distributed as d; d.all_reduce(torch.ones(1), async_op=True).get_future().then(print)",
        uncounted.CALLED,
    ),
    "no notes": (f"with {MODES}._disable_current_modes(): pass", uncounted.NOTES),
    "no notes by a stack of contexts": (
        f"import contextlib; contextlib.ExitStack().enter_context({MODES}._disable_current_modes())",
        uncounted.NOTES,
    ),
    "no notes by an alias": (
        "import torch; torch._tensor_str.torch._C._pop_torch_dispatch_stack(None)",
        uncounted.NOTES,
    ),
    "no notes by a key": ("import torch; torch._C._DisableTorchDispatch()", uncounted.NOTES),
    "no notes by another library": (
        "from torch.sparse import _semi_structured_ops as s\n    with s.no_dispatch(): pass",
        uncounted.NOTES,
    ),
    "operators in Python": ("import torch; torch._dispatch.python.enable_python_dispatcher()", uncounted.NOTES),
    "an operator of its own": (
        "import torch; torch.library.custom_op('mine::nothing', lambda: None, mutates_args=(), schema='() -> ()')",
        uncounted.OPERATOR,
    ),
    "another kernel": (
        "import torch; torch.library.Library('aten', 'IMPL').impl('neg', lambda x: x, 'CPU')",
        uncounted.OPERATOR,
    ),
    "notes": (f"{MODES}._get_current_dispatch_mode_stack()[-1].notes.calls.clear()", uncounted.NOTES),
    "a backend": (
        "import torch, torch.distributed as d\n"
        "    d.group.WORLD._get_backend(torch.device('cpu')).allreduce([torch.ones(1)])",
        uncounted.BACKEND,
    ),
    "a store of its own": ("import torch.distributed as d; d.HashStore().set('x', 'y')", uncounted.STORE),
    "a store by a helper of PyTorch": (
        "import torch.distributed as d; from torch.distributed.elastic.utils import store as s\n"
        "    s.get_all(d.distributed_c10d._get_default_store(), 0, 'x', 1)",
        uncounted.STORE,
    ),
    "RPC": (
        "import os, torch.distributed.rpc as r; os.environ.update(MASTER_ADDR='localhost', MASTER_PORT='29432')\n"
        "    r.init_rpc('a', rank=0, world_size=1)",
        uncounted.STORE,  # by which its processes find each other
    ),
    "shared memory": ("import torch; torch.ones(2).share_memory_()", uncounted.SHARED),
    "shared memory of Python": (
        "from multiprocessing.shared_memory import SharedMemory as S; S(create=True, size=9)",
        "calls mmap",
    ),
    "a message in a file": (
        "import os, tempfile; f = tempfile.mkstemp()[1]; open(f, 'w').write('x'); open(f).read()",
        closed.WRITTEN,
    ),
    "a module that it writes": (
        "import os, sys; d = os.path.dirname(__file__); sys.path.append(d)\n"
        "    open(os.path.join(d, 'other.py'), 'w').write('x = 1')\n"
        "    import other",
        closed.WRITTEN,
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
    f"open('{ROOT}/Makefile').read()",
    "import torch; print(torch.ones(2)); open(__import__('os').devnull, 'w').write('x')",
    "open(__file__ + '.log', 'a').write('x'); open(__file__ + '.log', 'a').write('x')",
    "import torch.distributed as d; d.barrier(d.new_group([0])); d.all_gather_object([None], 'x')",
    "from tqdm import tqdm; list(tqdm([1]))",
    "import torch\n    from torch.utils.flop_counter import FlopCounterMode\n"
    "    with FlopCounterMode(display=False): torch.ones(2, 2) @ torch.ones(2, 2)",
    "import torch; l = torch.nn.Linear(2, 2); x = torch.ones(1, 2)\n"
    "    torch.utils.checkpoint.checkpoint(l, x, use_reentrant=False).sum().backward()",
    "import torch; l = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
    "    l(torch.ones(1, 2)).sum().backward()",
    "import torch.distributed as d; d.device_mesh.init_device_mesh('cpu', (1,))",
]


@pytest.mark.parametrize("code", ALLOWED if ALL else ALLOWED[:2])
def test_what_is_allowed(code, tmp_path):
    verdict = hand_in(LAB, tmp_path, [(BODY, f"    {code}\n{BODY}")])
    assert verdict.passed, verdict.feedback
