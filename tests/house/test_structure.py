"""The plan of the house, read from the source: who imports whom, what is named where, and how large files get."""

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest

from tests.harness.ranks import ROOT

STEPS = sorted(path.parent.name for path in ROOT.glob("step*/train.py"))
FILES = sorted(path for folder in ("common", *STEPS, "tests") for path in (ROOT / folder).rglob("*.py"))
# What a user starts with python -m
COMMANDS = {"common.compare", "common.tracer", "common.export", "common.generate", "common.groups", "common.nodes"}
COURSE = ("costs", "drawing", "experiments", "explaining", "labs", "lockstep")  # rooms that training does without,
BUT = {"common.costs.hardware", "common.drawing.figures"}  # but for a device's peak (the MFU) and step 8's --shapes
COLLECTIVE = {f"common.{name}" for name in ("collectives", "gloo", "group", "process_groups", "start")}
COLLECTIVE |= {"common.launching.launch"}
COLLECTIVE |= {"step02_data_parallel.collectives_tour"}  # which shows some that no step needs
COLLECTIVE |= {"step02_data_parallel.hangs"}  # and what goes wrong
COLLECTIVE |= {"step08_5d.planning.dry_run.play"}  # which starts a world whose other ranks do not exist
COLLECTIVE |= {"common.labs.one_rank"}  # which has worlds of its own
COLLECTIVE |= {f"{step}.sketch" for step in STEPS}  # which import nothing of ours


def name_of(path: Path) -> str:
    """Dotted name of a file's module; a package is its `__init__`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in FILES}


@functools.cache
def imports_of(module: str) -> set[str]:
    """Modules of this project that a module imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in whole if name in MODULES} or {node.module}
    return found & MODULES.keys()


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes of a directed graph that remain when those that no arrow leaves, or none reaches, are removed again and
    again.
    """
    graph = {node: targets - {node} for node, targets in graph.items()}
    while graph:
        reached = set().union(*graph.values())
        kept = {node for node, targets in graph.items() if node in reached and targets & graph.keys()}
        if kept == graph.keys():
            break
        graph = {node: graph[node] & kept for node in kept}
    return sorted(graph)


def room_of_common(module: str) -> str:
    """The folder within common that a module belongs to: `common.tracing`, or `common` for the core."""
    parts = module.split(".")
    if module in COMMANDS:
        return module
    return ".".join(parts[:2]) if (ROOT / Path(*parts[:2])).is_dir() else parts[0]


def room_of(module: str) -> str:
    """The folder that a module lies in; one that lies directly in `common`, `tests` or a step is a room of its own."""
    folder = MODULES[module].parent.relative_to(ROOT)
    return ".".join(folder.parts) if len(folder.parts) > 1 else module


def step_of(module: str) -> int:
    """Number of the step that a module belongs to; 0 for common."""
    match = re.match(r"step(\d+)_", module)
    return int(match.group(1)) if match else 0


def test_no_modules_import_each_other_in_a_circle():
    assert circle({module: imports_of(module) for module in MODULES}) == []


def test_no_rooms_of_common_import_each_other_in_a_circle():
    rooms: dict[str, set[str]] = {}
    for module in MODULES:
        if module.split(".")[0] == "common":
            rooms.setdefault(room_of_common(module), set()).update(map(room_of_common, imports_of(module)))
    assert circle(rooms) == []
    assert rooms["common"] == {"common"}, "the core imports no room"


def test_no_rooms_import_each_other_in_a_circle():
    """Anywhere. A room and one within it may use each other."""
    rooms: dict[str, set[str]] = {}
    for module in MODULES:
        mine = room_of(module)
        others = {room_of(other) for other in imports_of(module)} - {mine}
        inside = {each for each in others if f"{each}.".startswith(f"{mine}.") or f"{mine}.".startswith(f"{each}.")}
        rooms.setdefault(mine, set()).update(others - inside)
    assert circle(rooms) == []


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith("tests")])
def test_imports_point_one_way(module):
    number, experiment = step_of(module), re.search(r"\.(experiments|labs|gpu_ladder|narrow_numbers\.__main__)", module)
    for other in imports_of(module):
        assert not other.startswith("tests"), f"{module} imports {other}"
        assert step_of(other) <= number, f"{module} imports {other}, which comes later"
        if ".experiments" in other:
            assert experiment, f"{module} imports {other}: only experiments import experiments"
            assert step_of(other) in (0, number), f"{module} imports another step's experiments, {other}"


@pytest.mark.parametrize("module", [module for module in MODULES if step_of(module) and ".experiments" not in module])
def test_a_step_names_no_later_step(module):
    named = re.findall(r"\bstep ?0?(\d)(?=_|\b)", MODULES[module].read_text())
    assert all(int(number) <= step_of(module) for number in named), f"{module} names step {max(named)}"


@pytest.mark.parametrize("module", [module for module in MODULES if not re.match(r"tests|step\d+_\w+\.labs", module)])
def test_a_seam_says_what_it_does_and_not_for_whom(module):
    """What a mechanism offers is useful to any program; labs speak of the steps of a training."""
    text = re.sub(r"\W+", " ", MODULES[module].read_text(encoding="utf-8"))  # a line may end between the words
    assert not re.search(r"\blater steps?\b", text), module


def test_a_name_is_that_of_one_class():
    """What one file says of a class holds wherever its name is met. A subclass may have the name of its base. (Labs are
    read one by one.)
    """
    classes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        if not re.search(r"^tests|\.labs\b", module):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                own = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
                if own and not any(ast.unparse(base).endswith(f".{node.name}") for base in node.bases):
                    classes.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in classes.items() if len(modules) > 1} == {}


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith("tests")])
def test_collectives_go_through_collectives(module):
    """Everybody else talks to other ranks through common/collectives.py, which counts and records."""
    if module not in COLLECTIVE and ".labs." not in module:  # what students write is like a sketch
        direct = (
            r"import torch\.distributed as|from torch import distributed|torch\.distributed\.(?!checkpoint|run)\w+\("
        )
        assert not re.search(direct, MODULES[module].read_text()), f"{module} uses torch.distributed itself"


def lacks_encoding(call: ast.Call) -> bool:
    """Whether a call opens a file as text, or starts a process whose output is text, without saying the encoding."""
    function, options = ast.unparse(call.func), {word.arg: ast.unparse(word.value) for word in call.keywords}
    if re.fullmatch(r"(subprocess\.\w+|.*\.communicate)", function):
        return options.get("text") == "True" or options.get("universal_newlines") == "True"
    if not re.search(r"(^|\.)(open|fdopen|read_text|write_text)$", function) or function in ("os.open", "Image.open"):
        return False
    modes = [options.get("mode", ""), *(ast.unparse(each) for each in call.args)]
    return "encoding" not in options and not any(re.fullmatch(r"'\w*b\w*'", mode) for mode in modes)


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith("tests")])
def test_it_runs_anywhere(module):
    """Python's default encoding is that of the locale, which may be ASCII; `python -O` removes assertions, and
    `python -OO` docstrings.
    """
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        where = f"{module}, line {getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Assert), f"{where}: python -O would not check this; raise an error"
        assert not (isinstance(node, ast.Call) and lacks_encoding(node)), f"{where} does not say the encoding"
        doc = isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("__doc__")
        assert not doc, f"{where}: the docstring may be None; there is `summary`"


def needed_by(*modules: str) -> set[str]:
    """These modules, and those that they import, directly or not."""
    found, ahead = set(), set(modules)
    while ahead:
        found |= ahead
        ahead = set().union(*map(imports_of, ahead)) - found
    return found


def test_the_model_knows_nothing_of_ranks():
    assert not {"common.group", "common.process_groups"} & needed_by("common.model")


MECHANISMS = {  # what our flags are handed to by train.py, `apply_...` and `..._of(config)`
    1: "mixed_precision recompute clipping",
    2: "data_parallel",
    3: "unit zero by_layer",
    4: "tensor_parallel linear operators ring vocab_parallel partial_sums",
    5: "pipeline stages weight_gradients schedules.catalogue schedules.validator",
    6: "ring_attention ulysses_attention all_gather_attention attention_block sequence_layouts",
    7: "router capacity moe experts expert_parallel balancing overlap turns",
    8: "kernels.flash_attention kernels.linear_cross_entropy narrow_numbers.linear narrow_numbers.gather",
}


@pytest.mark.parametrize("step", MECHANISMS)
def test_a_mechanism_knows_no_flags(step):
    """Nor our model, so that it can be lifted out: see common/your_own_model.md."""
    for module in (f"{STEPS[step - 1]}.{name}" for name in MECHANISMS[step].split()):
        assert "common.config" not in needed_by(module), f"{module} loads all flags"
        if not module.endswith("recompute"):  # where apply_recompute stands beside it
            assert not re.search(r"\bDecoder\b", MODULES[module].read_text()), f"{module} knows our model"


def test_training_does_without_the_course():
    used = needed_by(*(f"{step}.train" for step in STEPS))
    assert {module for module in used if module.startswith(tuple(f"common.{room}." for room in COURSE))} == BUT


@pytest.mark.parametrize("room", ["common", *STEPS, "tests"])
def test_every_module_can_be_imported(room):
    """Also those that no test needs. pytest imports the tests themselves."""
    for module in MODULES:
        if module.startswith(f"{room}.") and not re.search(r"\.test_\w+$", module):
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                assert error.name == "triton", module


MOST_LINES = {2: 450, 5: 750, 6: 850, 7: 800}  # of a mechanism; in the other steps 700


@pytest.mark.parametrize("step", STEPS)
def test_a_mechanism_can_be_read(step):
    """The files that a lesson lists at the beginning of *The code* make up its mechanism."""
    lesson = (ROOT / step / "README.md").read_text()
    found = re.search(r"^## The code[^\n]*\n[^`#]*```\n(.*?)^```", lesson, re.DOTALL | re.MULTILINE)
    files = dict.fromkeys(re.findall(r"^(\S+\.py) +\S", found.group(1), re.MULTILINE))  # each once
    text = "".join((ROOT / step / file).read_text() for file in files)
    lines = len(re.sub(r"^ *# --- (write this yourself|until here) ---\n", "", text, flags=re.MULTILINE).splitlines())
    assert 0 < lines <= MOST_LINES.get(step_of(f"{step}.train"), 700), f"{step}: {lines} lines in {', '.join(files)}"


def test_files_stay_readable():
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert {module: length for module, length in lengths.items() if length > 325} == {}
    users = [f"{step}.train" for step in STEPS]
    used = {module for module in needed_by(*COMMANDS, *users) if module.startswith("common")}
    used = {module for module in used if room_of_common(module) != "common.explaining"}  # a program of its own
    assert sum(lengths[module] for module in used) <= 5090, "what a train.py or a command imports, wherever it is"
    core = {module for module in MODULES if room_of_common(module) == "common"}
    assert sum(lengths[module] for module in core) <= 2190
