"""What teaching.md tells teachers to run can be run; the slides say what their lesson says, and can be read."""

import base64
import html
import importlib.util
import io
import re
from pathlib import Path

import numpy
import pytest
from PIL import Image

from common.config import TrainConfig
from common.labs import __main__ as command
from common.labs import exhibits, find, pictures, sentences, shown_code, slides
from common.launching.command_line import parse
from step05_pipeline.schedules.__main__ import main as draw_schedule
from step08_5d.planning.__main__ import main as plan
from tests.house.test_readme import commands

PAGE = find.ROOT / "common" / "labs" / "teaching.md"
LESSONS = sorted(find.ROOT.glob("step*/README.md"))


def configured(script: str, flags: list[str], ranks: int) -> TrainConfig:
    config = parse(int(script[4:6]), flags)
    config.resolve_and_check(ranks)
    return config


@pytest.mark.parametrize("line", commands(PAGE))
def test_its_commands_can_be_run(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = line.replace("runs/", f"{tmp_path}/").split()
    if words[0] == "torchrun":
        assert words[1] == "--nproc_per_node" and (find.ROOT / words[3]).exists()
        configured(words[3], words[4:], int(words[2]))
    elif words[0] in ("export", "bash"):  # in the folder of a hunt
        assert line.startswith("export PYTHONPATH=$PWD") or words[1].endswith("run.sh")
    elif words[1:4] in (["-m", "common.labs", "check"], ["-m", "common.labs", "watch"]):
        assert len(words) == 4  # after the `start` above it
    elif words[1:4] == ["-m", "common.labs", "board"]:  # after the checks of a room that has named the folder
        assert f"--board {line.split()[4]} " in PAGE.read_text(encoding="utf-8")
    elif words[1] != "-m":
        assert (find.ROOT / words[1]).exists()
        assert "train.py" not in words[1] or configured(words[1], words[2:], 1)
    elif words[2] == "common.labs":
        monkeypatch.setattr(
            command, "write_slides", lambda folder, out: slides.write_slides(folder, tmp_path / out.name)
        )
        assert command.main([*words[3:], "--home", str(tmp_path / "labs")]) == 0
    elif words[2] in ("common.compare", "common.tracer"):  # after the runs above them
        runs = [word for word in words[3:] if word.startswith(str(tmp_path)) and not word.endswith(".png")]
        assert runs and all(f"--run-dir runs/{Path(run).relative_to(tmp_path)}" in PAGE.read_text() for run in runs)
    elif words[2] == "step08_5d.labs.profiled":  # where there is a GPU
        assert importlib.util.find_spec(words[2])
    else:
        assert {"step05_pipeline.schedules": draw_schedule, "step08_5d.planning": plan}[words[2]](words[3:]) == 0


def test_what_it_promises_of_labs():
    """Answers of those that a room does together; the number whose bug the loss hides, which divides twice."""
    labs, text = find.all_labs(), PAGE.read_text(encoding="utf-8")
    asked = [labs["predict-02-a"].experiment(0).questions[0], *labs["predict-01-a"].experiment(0).questions]
    assert len(asked) == 3 and all(f"{question.expected:,.0f}" in text for question in asked)
    assert "the mean is taken twice" in labs["hunt-02-a"].bug(2).why and "hunt-02-a --student 2" in text
    assert "compare --zero 1" in labs["hunt-03-a"].bug(0).why


def test_its_labs_exist():
    named = set(re.findall(r"`((?:write|hunt|predict|schedule|design|gpu)-\d\d-\w)`", PAGE.read_text()))
    assert len(named) > 20 and named <= find.all_labs().keys()


@pytest.fixture(params=LESSONS, ids=lambda path: path.parent.name, scope="module")
def lesson(request, tmp_path_factory):
    """A lesson, and its slides."""
    path = slides.write_slides(request.param.parent, tmp_path_factory.mktemp("slides") / "folder" / "slides.html")
    return request.param, path.read_text(encoding="utf-8")


def test_slides_show_all_but_the_exercises(lesson):
    path, page = lesson
    text = re.sub(r"<details>.*?</details>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not re.search(r"<h2>(Exercises|Answers)", page) and page.count("<section") == page.count("</section>") > 20
    assert "http" not in re.sub(r"data:image/\S+", "", page), "a slide needs the network"
    assert "<h2>One step, in order</h2>" in page, "where agendas stop"
    assert min(float(size) for size in re.findall(r"--own: ([\d.]+)px", page)) >= 16.5, "too small for the last row"
    for section in slides.sections(text):
        said = [exhibits.inline(each) in page for each in slides.paragraphs(section.text)]
        assert all(said) or section.heading in slides.LEFT_OUT, section.heading
        blocks = slides.BLOCK.findall(section.text) if section.heading not in slides.LEFT_OUT else []
        assert page.count("<pre") + page.count("<table") + page.count("<figure") >= len(blocks)


def test_each_picture_has_a_heading_and_its_sentence_and_can_be_read(lesson):
    _, page = lesson
    found = re.findall(r'<img alt=".*?" src="data:image/(\w+);base64,(.*?)"><figcaption>(.*?)</figcaption>', page)
    assert len(found) == page.count("<figure") > 3
    for kind, data, caption in found:
        assert 6 < len(caption.split()) < 50 and "*" not in caption and "nimation" not in caption
        assert kind == "png" or sentences.LOOK.match(caption), "an animation that does not say what to look at"
        assert not re.search(r"\b(?:upper|lower) picture", caption), "a half that speaks of the other one"
        size = Image.open(io.BytesIO(base64.b64decode(data))).size
        assert max(pictures.scale(size, each) for each in pictures.rooms(caption)) >= pictures.SMALLEST - 0.1
    for slide in re.findall(r"<section.*?</section>", page, flags=re.DOTALL):
        assert "<h1>" in slide or "<h2>" in slide.split("<figure")[0]


def test_each_slide_says_enough_and_has_notes_of_its_own(lesson):
    _, page = lesson
    assert "\\*" not in page, "a star with its backslash"
    before = ""
    for slide in re.findall(r"<section[^>]*>(.*?)</section>", page, flags=re.DOTALL):
        shown, notes = slide.split("<aside>")
        words = re.sub(r"<.*?>", " ", shown).split()
        assert len(words) >= 30 or re.search("<(?:pre|table|figure)", shown), shown
        assert len(notes.split()) > 10 and notes != before
        before = notes


def test_what_is_on_a_slide_has_room(lesson):
    items = slides.items_of_lesson(lesson[0].parent)
    places = slides.divided(items)
    assert places[0][0] == 0 and places[-1][1] == len(items)
    assert all(end == start for (_, end), (start, _) in zip(places, places[1:]))
    for start, end in places:
        high = sum(item.high for item in items[start:end] if item.shown) - (slides.TITLE if start == 0 else 0)
        assert high <= exhibits.ROOM and not items[start].follows


SAID = {  # of a paragraph: what a slide leaves out at its beginning and its end
    "Here begins the second half. **How does a rank get the sum?** By an all-reduce of two halves.": (29, 0),
    "**Two names for later.** A mesh holds groups of ranks. A spec says which part a process holds.": (0, 0),
    "A rank keeps a quarter of all weights, and of their moments. **This makes room for activations.**": (0, 0),
    "Nobody waits here. A rank that has finished its part of the backward sends gradients (as in Fig. 3) to all:": (
        19,
        0,
    ),
    "A rank sends its gradients. It goes on. So we see this picture:": (0, 0),
    "1. **Fill.** Rank 0 runs forwards until it reaches its limit, which is four. More is not allowed.": (0, 21),
    "> **Rule of thumb:** begin with data parallelism.": (0, 0),
}


WITH_WHAT_IS_BEFORE = {  # sentences that say nothing without the one before them, and those that do
    "In a ring, ranks send to neighbors. For the loss, a rank holds logits:": "The first is the gradient of the loss.",
    "If repeated FLOPs count, the ratio is called HFU.": "What a kernel repeats is counted in neither.",
    "A product takes 2 FLOPs per parameter and token.": "To use the scores takes as many, and to compute twice that.",
    "A class saves its inputs for an autograd function.": "The function takes the gates and the loss.",
    "How long would one GPU take?": "Forward and backward take six operations per parameter and token.",
    "AdamW looks at every number on its own.": "Clipping is the one exception, since it needs the whole norm.",
    "Tokens are almost as independent.": "The exception is attention, in which a token sees others.",
    "The model has 96 parameters, and pp 2 and tp 2 divide them.": "Each quarter is summed over a ring of four ranks.",
    "All rows are for a GPU at its peak.": "A slower one needs fewer tokens, since its messages have more time.",
    "It needs 37 % of its tokens.": "On 8 nodes, that is 7,800 instead of 21,200, which we use below.",
    "Let s be the tokens and h their width.": "The keys of a rank in one layer are then 2 · s · h numbers in all.",
    "Think of eight neighbors who share a toolbox.": "Each keeps an eighth of the tools, and borrows the rest.",
    "Three tensors and their copies are in memory at once.": "With recomputation, it leaves three times as much.",
    "Each sublayer gathers once, which makes four messages.": "In the backward, their mirrors are another four.",
    "There is an operator for each direction.": "A sublayer is enclosed by two of them.",
    "Gate and up hide their messages on a node.": "Q, k and v have fewer columns, so they stop hiding earlier.",
    "A formula counts only products with weights, but there are norms.": "Compare the two for 384 tokens of 4 layers.",
    "Compare what was said here for 384 tokens, and no others.": "The model has 4 layers of width 256, or 11.0 MB.",
    "Two wishes pull apart.": "Small buckets pay latency, and large ones are exposed.",
}


@pytest.mark.parametrize("before", WITH_WHAT_IS_BEFORE, ids=lambda text: text[:12])
def test_a_sentence_takes_along_what_it_points_at(before):
    said = sentences.points(f"{before} {WITH_WHAT_IS_BEFORE[before]} **So it is.**", leads=False)
    assert len(said) == 1 and before.split(". ")[-1] in said[0]


def test_what_defines_a_term_is_said():
    term = "If only needed FLOPs count, we call it **MFU**, model FLOPs utilization."
    said = sentences.points(f"A step of this model takes six seconds in all. {term} Nobody reports more.", leads=False)
    assert said == [term]
    counted = "Now two more things. First, blocks are merged in float32. Second, keys are sent as far as needed."
    assert sentences.first_sentences(f"{counted} Nobody waits. They " + "wait. " * 60).startswith(counted)
    assert sentences.first_sentences("First, merge. Second, send what is needed. " + "More. " * 60, 5).endswith(
        "needed."
    )
    after = "This ratio is below one. **It falls if you waste work.**"
    assert sentences.begins_back(after, sentences.points(after, leads=False))
    assert sentences.points("A step takes long. Divide one by the other.", leads=False, is_meant=True)


@pytest.mark.parametrize("paragraph", SAID, ids=lambda text: text[:12])
def test_what_a_slide_says_can_be_understood_alone(paragraph):
    before, behind = SAID[paragraph]
    assert sentences.points(paragraph, leads=paragraph.endswith(":")) == [paragraph[before : len(paragraph) - behind]]


def test_a_heading_without_exhibits_is_on_a_slide():
    text = (find.ROOT / "step08_5d/README.md").read_text(encoding="utf-8")
    topics = {part.topic for part in slides.sections(text) if part.topic and "<details>" not in part.text}
    shown = {item.topic for item in slides.items_of_lesson(find.ROOT / "step08_5d") if item.shown}
    assert "2. Reach the batch" in shown and topics <= shown


def test_parts_of_a_cut_picture_keep_its_head_and_foot(tmp_path):
    """The lower part begins with the names of columns, and both end with a legend."""
    for file, cut in pictures.CUTS.items():
        path = find.ROOT / file.replace("/", "/figures/")
        upper, lower = pictures.parts(path, "Each row is a rank. " * 40)
        with Image.open(path) as whole:
            assert upper[1] == (whole.width, cut.at + cut.foot)
            assert lower[1] == (whole.width, cut.head + whole.height - cut.at)
            head = numpy.asarray(whole.convert("RGB"))[: cut.head]
        shown = numpy.asarray(Image.open(io.BytesIO(base64.b64decode(lower[0]))).convert("RGB"))[: cut.head]
        assert (abs(shown.astype(int) - head) <= 8).all()


def test_captions_are_short_and_stars_are_stars():
    caption = (
        "Two ranks, each with a half of the weights. White is free. " + "A detail is described at length here. " * 9
    )
    said = sentences.captions(caption + "Below, two ranks. Follow the blue one: it comes home.")
    assert said.whole.startswith("Two ranks, each") and len(said.upper) < 140
    assert said.whole == f"{said.upper} Below, two ranks. Follow the blue one: it comes home."
    assert said.lower == "Two ranks. Follow the blue one: it comes home." and said.moving.startswith("Follow the blue")
    both = sentences.captions(
        "Four ranks and their bytes. Left: memory. It is " + "long. " * 20 + "Right: time, measured."
    )
    assert both.whole.startswith("Four ranks") and both.whole.endswith("Right: time, measured."), (
        "a panel without words"
    )
    assert sentences.captions("Below on the left, a.").lower == "On the left, a."
    assert sentences.captions("In the upper picture, a.").upper == "A." and set(sentences.captions("One.")) == {"One."}
    assert exhibits.inline(r"f\* and `g*`, *not* **h\***") == (
        "f&#42; and <code>g&#42;</code>, <i>not</i> <b>h&#42;</b>"
    )


def test_each_slide_says_where_it_belongs_and_its_code_where_it_is_from(lesson):
    path, page = lesson
    title = re.match(r"# (.*)", path.read_text(encoding="utf-8"))[1]
    places = re.findall(r'<section data-place="(.*?)">', page)
    assert all(each.startswith(title) for each in places)
    code = [pre for pre in re.findall(r"<pre.*?>(.*?)</pre>", page, flags=re.DOTALL) if 'class="keyword"' in pre]
    where = re.findall(r'<p class="where">(\S+), line (\d+)</p>', page)
    assert len(where) >= len(code) and all((find.ROOT / file).is_file() for file, _ in where)


def test_commands_and_tables_become_narrower_for_larger_letters():
    command = (
        f"python -m common.compare runs/one \\\n    runs/two --tolerance 1e-5 {'--out runs/lesson/compare.png ' * 3}"
    )
    lines = exhibits.fitted(command.strip(), "bash").splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 86 and all(line.endswith(" \\") for line in lines[:-1])
    assert re.sub(r"[\s\\]+", " ", "".join(lines)).split() == re.sub(r"[\s\\]+", " ", command).split()
    table = f"a{' ' * 90}1   x\nbb{' ' * 89}2   y"
    assert exhibits.fitted(table, "") == "a   1  x\nbb  2  y" and exhibits.fitted("a    b", "") == "a    b"


def test_code_between_the_lines_around_it():
    folder = find.ROOT / "step03_zero"
    where, code = shown_code.in_context("weight = gather(shard)\ndy = dy * (activations.pop() > 0)\n", folder)
    assert where == "", "half a line is no line"
    lines = (folder / "sketch.py").read_text(encoding="utf-8").splitlines()
    number = next(at for at, line in enumerate(lines) if "reduce_scatter(dweight)" in line)
    where, code = shown_code.in_context(lines[number - 1].strip() + "\n" + lines[number].strip() + "\n", folder)
    shown = html.unescape(re.sub(r"<.*?>", "", code)).splitlines()
    assert where == f"step03_zero/sketch.py, line {number}" and shown[0].startswith("def train_step(")
    assert shown[1].strip() == "..." and shown[4].strip() == lines[number - 1].strip()
    colored = shown_code.colored('for x in "a#b":  # 1 < 2')
    assert colored.startswith('<span class="keyword">for</span> x ') and '<span class="string">"a#b"</span>' in colored
    assert colored.endswith('<span class="comment"># 1 &lt; 2</span>')


def test_long_lines_of_code_are_broken_for_larger_letters():
    line = "    rows += " + ", ".join(f"[grid.movedim({n}, 0)]" for n in range(2)) + "  # " + "a remark " * 6
    assert shown_code.broken(line) == [f"    # {'a remark ' * 6}".rstrip(), line.split("  #")[0]]
    call = f"    k, v = apply(torch.stack((k, v)), {', '.join(['pass_on'] * 8)}, dim=(me + 1, me - 1))"
    parts = shown_code.broken(call)
    assert len(parts) == 2 and max(map(len, parts)) <= shown_code.WIDTH and parts[1].startswith(" " * 12)
    assert "".join(map(str.strip, parts)).replace(",", ", ").replace(",  ", ", ") == call.strip()
    assert shown_code.broken("short = 1  # as it is") == ["short = 1  # as it is"]
