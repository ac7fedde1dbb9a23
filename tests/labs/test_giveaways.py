"""No hunt is won by a cheap trick: nothing but its numbers tells a bug from the code around it."""

import json
import re
import shutil
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from common.labs.copies import HIDDEN, copy_project, edited, files, read, shown
from common.labs.find import ROOT
from common.labs.hunt import TOLERANCE
from common.labs.training import SMALL, Launch, first_difference, train
from tests.labs.test_hunts import LABS, VARIANTS, names, slow
from tests.mutants.patches.hunts import HUNTS

each_variant = pytest.mark.parametrize(("lab", "student"), VARIANTS, ids=names)


def removed(bug) -> dict[str, list[str]]:
    """By file: what the bug takes away, line by line, without indentation."""
    lines = {}
    for file, text in bug.texts.items():
        kept = Counter(text.splitlines())
        lines[file] = [line.strip() for line in read(ROOT / file).splitlines() if line not in kept and line.strip()]
    return lines


@each_variant
def test_files_have_as_many_lines_as_in_other_folders(lab, student):
    bug = lab.bug(student)
    for file in bug.texts:
        assert shown(file, bug.beside + bug.edits).count("\n") == shown(file).count("\n"), f"{file}: `wc -l` names it"
        assert [*edited(bug.edits)] and all(edit.old != edit.new for edit in bug.beside + bug.edits)
    assert set(lab.places(bug)) == {edit.file for edit in bug.edits}


@each_variant
def test_no_other_file_shows_what_is_right(lab, student):
    """As steps differ from each other in their subject alone, a `diff` of two train.py would show what else differs."""
    bug = lab.bug(student)
    copied = [*files(lab.step, lab.extra)]
    for file, lines in removed(bug).items():
        twins = [path for path in copied if path.name == Path(file).name and path != Path(file)]
        assert not twins, f"{file} can be compared with {twins[0]}"
        others = [read(ROOT / path) for path in copied if path != Path(file)]
        again = [line for line in lines if len(line) > 30 and any(line in text for text in others)]
        assert not again, f"{again[0]!r} is in another file, too"


@each_variant
def test_no_page_shows_what_is_right(lab, student):
    """Else each line of an excerpt could be looked for in the folder: the one that is not there is the bug."""
    found = [page for folder in ROOT.glob("step0*") for page in folder.rglob("*.md")]
    pages = [re.sub(r"\s+", " ", page.read_text(encoding="utf-8")) for page in [*found, *ROOT.glob("common/**/*.md")]]
    for line in (line for lines in removed(lab.bug(student)).values() for line in lines if len(line) > 20):
        assert not any(line in page for page in pages), line


@each_variant
def test_it_is_not_the_bug_of_an_exercise(lab, student):
    """Whoever has read the lesson knows that one."""
    for quote in HUNTS.quotes:
        module = quote.place.partition(":")[0].replace(".", "/")
        for edit in lab.bug(student).edits:
            assert edit.file != f"{module}.py" or quote.old not in edit.old and edit.old not in quote.old, quote


def ruff(*arguments) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "--no-cache"], capture_output=True, encoding="utf-8"
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_what_a_linter_says(tmp_path):
    """Of the copies it says what it says of the right ones, with all of its rules; and they are formatted."""
    for name, (lab, student) in zip(names, VARIANTS):
        bug = lab.bug(student)
        for file in bug.texts:
            for kind, text in (
                ("right", shown(file)),
                ("wrong", shown(file, bug.beside + bug.edits)),
                ("whole", bug.texts[file]),
            ):
                path = tmp_path / kind / name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    found = Counter()
    for row in json.loads(ruff("check", "--select", "ALL", "--output-format", "json", tmp_path)):
        kind, *where = Path(row["filename"]).relative_to(tmp_path).parts
        found[kind, "/".join(where), row["code"]] += 1
    told = {row[1:]: count for row, count in found.items() if row[0] == "wrong"}
    assert told and not {row: count for row, count in told.items() if count > found[("right", *row)]}
    assert "reformatted" not in ruff("format", "--check", tmp_path / "whole")


def test_a_folder_tells_nothing_by_its_files(tmp_path):
    """Neither permissions nor times; and no word of a version control."""
    lab, bug = LABS[1], LABS[1].bug(0)
    copy_project(tmp_path, lab.step, bug.beside + bug.edits, lab.extra)
    states = [path.stat() for path in tmp_path.rglob("*.py")]
    assert len({stat.S_IMODE(each.st_mode) for each in states}) == 1
    order = sorted(tmp_path.rglob("*.py"), key=lambda path: path.stat().st_mtime_ns)
    assert [path.relative_to(tmp_path).as_posix() for path in order][-1] == HIDDEN
    for lab in LABS:
        assert not re.search(r"\bcommit", lab.task), f"{lab.id}: its folder has none"


# ---- what the handouts suggest to try --------------------------------------------------------------------------------

LATENT = "--latent 12,16,8,16,8 --kv-heads 4 --optimizer adamw --lr 0.2"
STEPS = {int(path.parent.name[4:6]): path.relative_to(ROOT).as_posix() for path in ROOT.glob("step0*/train.py")}
TRIED = {  # lab: flags of all, and, by the number of ranks, each flag and each pair that handouts and hints name
    "hunt-01-a": ("", {1: "--micro-batch 12|--micro-batch 3|--micro-batch 6|--micro-batch 1"}),
    "hunt-02-a": ("", {2: "|--micro-batch 6|--micro-batch 1|--dp-mode naive|--dp-mode overlap"}),
    "hunt-03-a": (
        "",
        {
            2: "--zero 1|--zero 2|--zero 3|--micro-batch 6|--zero 2 --micro-batch 6|--zero 3 --micro-batch 6",
            4: "--zero 1 --zero-replicas 2|--zero 2 --zero-replicas 2|--zero 3 --zero-replicas 2",
        },
    ),
    "hunt-04-a": (
        "",
        {
            1: "--tp 1",
            2: "--tp 2|--tp 2 --no-sequence-parallel|--tp 2 --micro-batch 1|--tp 2 --tp-mode plain|"
            "--tp 2 --no-sequence-parallel --micro-batch 1",
        },
    ),
    "hunt-05-a": (
        "",
        {
            2: "|--pp 2|--tie-embeddings|--no-tie-embeddings|--clip 0.5|--pp 2 --clip 0|--pp 2 --clip 0.5|"
            "--pp 2 --tie-embeddings|--pp 2 --tie-embeddings --clip 0.5|--pp 2 --no-tie-embeddings"
        },
    ),
    "hunt-06-a": (
        "",
        {
            2: "--cp 2|--cp 2 --cp-split contiguous|--cp 2 --cp-split striped|--cp 2 --cp-mode allgather|"
            "--cp 2 --cp-mode ulysses|--cp 2 --cp-mode allgather --cp-split contiguous|"
            "--cp 2 --cp-mode ulysses --cp-split striped"
        },
    ),
    "hunt-07-a": ("--experts 4", {1: "", 2: "|--ep 2|--tp 2|--zero 1|--ep 2 --zero 1", 4: "--ep 2 --tp 2"}),
    "hunt-08-a": (
        "",
        {
            2: "|--tp 2|--pp 2|--pp 2 --schedule dualpipe|--tp 2 --no-sequence-parallel",
            4: "--tp 2 --pp 2|--tp 2 --pp 2 --schedule dualpipe",
        },
    ),
    "hunt-08-b": (LATENT, {1: "", 2: "--tp 2|--tp 2 --no-sequence-parallel|--tp 2 --tp-mode plain"}),
}


@slow
@each_variant
def test_what_handouts_suggest_runs(lab, student, tmp_path):
    """A traceback would end in the bug's own line. Here all ends well, and some of it is wrong."""
    folder, (base, tried) = tmp_path / "lab", TRIED[lab.id]
    folder.mkdir()
    lab.start(folder, student)
    script = lab.bug(student).seen[1].script if lab.step == 1 else STEPS[lab.step]
    launches = [
        Launch(script, f"{base} {flags}", ranks) for ranks, all_flags in tried.items() for flags in all_flags.split("|")
    ]
    right, wrong = (train([(each, root) for each in launches], tmp_path, SMALL) for root in (ROOT, folder))
    assert any(first_difference(*pair, TOLERANCE) for pair in zip(right, wrong)), "no flag shows the bug"
