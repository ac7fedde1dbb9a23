"""What a slide takes along, so that it can be understood alone, and where it begins."""

import functools
import re

import pytest

from common.labs import find, references, sentences, slides
from common.labs.exhibits import inline

LESSONS = [path.parent for path in sorted(find.ROOT.glob("step*/README.md"))]


@pytest.fixture(params=LESSONS, ids=lambda path: path.name, scope="module")
def lesson(request):
    return request.param


@functools.cache
def deck(folder):
    """The items of a lesson's slides, which of them are on each slide, and what each shows without its notes."""
    items = slides.items_of_lesson(folder)
    places = slides.divided(items)
    named = references.where_things_are(items, places)
    return items, places, [slides.drawn(named, start, end, "").split("<aside>")[0] for start, end in places]


def test_what_a_paragraph_sets_out_for_is_said():
    flaw = "**One flaw remains.** Think of two sublayers, and of the tensor that runs through all of the blocks. "
    flaw += (
        "Llama adds a sublayer's output to it, on every rank, and then it normalizes the result. All ranks compute it."
    )
    assert sentences.points(flaw, leads=False) == [flaw]
    test = "To test it, we build two nodes. " + "The network between them is a real one, with a real delay. " * 4
    assert sentences.points(test.strip(), leads=False) == [test.strip()]
    four = "**When is a product long enough?** Look at one of these four: q, k and v gather their x once more."
    assert sentences.begins_back(four, sentences.points(four, leads=False)), "which four, says the paragraph before"
    commands = "This is a row of it. It is four times slower, so that cores can keep up. " + "A message waits. " * 5
    assert sentences.points(commands.strip(), True, leading=sentences.COMMANDS) == [commands.strip()]
    assert "lasts" in sentences.points("Suppose that it lasts. What happens on two nodes?", leads=True)[0]


TAKEN_ALONG = {  # what a slide says, and the sentence of its lesson without which nobody understands it
    "The other parameters cost this token no computation": "In Mixtral 8x7B each layer has eight MLPs",
    "ZeRO-3 can do it: it stores an eighth": "a token passes through two of them",
    "We divide their scores by their sum": "The two best belong to E2 (green) and E1 (orange)",
    "That is harmless.": "if all tokens choose E2 and E3?</b> Then rank 1 does all the work.",
    "Eight ranks that repeat the other 1.6 billion": "experts are 11.3 of the 12.9 billion parameters",
    "rank 5, which has computed the rest": "Tokens of ranks 0 to 3 that chose E2 have traveled to rank 1",
    "sends away only 64 % of its own copies": "one rank's experts got 36 % of all choices",
    "Why not tensor parallelism over all 32 GPUs?": "we take four nodes, 32 GPUs",
    "Is a part of the 14.9 % just a longer bubble": "each GPU lost 14.9 % of its speed",
    "So the message is faster than the forward if": "a message holds h numbers of β bytes",
    "the two largest neighbors are the last layer": "the weights of two units, the one that computes and the next",
    "Every GPU takes part in all eight rings": "each part goes around a ring of its own",
    "So in each ring a GPU sends 50 GB/s": "a network card of its own, which sends 50 GB/s",
}


def test_the_other_and_the_rest_stand_where_the_first_is_said():
    shown = []
    for folder in LESSONS:
        shown += ["", *(" ".join(re.sub(r"</?(?:i|code)>", "", slide).split()) for slide in deck(folder)[2])]
    for said, needed in TAKEN_ALONG.items():
        for number, slide in enumerate(shown):
            assert said not in slide or needed in shown[number - 1] + slide, said
    for needed in TAKEN_ALONG.values():
        assert sum(needed in slide for slide in shown) == 1, needed


def test_an_amount_to_which_a_slide_returns_has_been_shown(lesson):
    """In the same section, what is only in the notes must not be the first that says it, unless it is calculated."""
    items, places, bodies = deck(lesson)
    section, before, shown = None, {}, set()
    for (start, end), body in zip(places, bodies, strict=True):
        for item in items[start:end]:
            before, section = before if item.section == section else {}, item.section
            if not item.notes or "<figure" in item.body:
                shown |= set(sentences.AMOUNT.findall(re.sub("<.*?>|= ", "", item.body)))
                continue
            for sentence in sentences.split(item.notes):
                amounts = set(sentences.AMOUNT.findall(sentence))
                if inline(sentence) in body:
                    missing = amounts & set(before) - shown
                    assert not missing, (sentence, [before[amount] for amount in missing])
                    shown |= set(sentences.AMOUNT.findall(sentence.replace("= ", "")))
                else:
                    before |= dict.fromkeys(amounts, sentence)


def test_a_heading_that_counts_is_followed_by_all_that_it_counts():
    shown = [item.body for item in slides.items_of_lesson(find.ROOT / "step02_data_parallel") if item.shown]
    for mode in ("naive", "overlap", "bucket"):
        assert any(f"This is <code>--dp-mode {mode}</code>" in body for body in shown)


def test_a_table_on_another_slide_is_named(lesson):
    said = "on the slide before"
    assert (
        references.said_of_table("<p>The last two rows differ.", said)
        == f"<p>The last two rows of the table {said} differ."
    )
    assert references.said_of_table("<p>In the table above", said) == f"<p>In the table {said}"
    assert references.said_of_table("<p>Look at the table's last entry", "on slide 3").endswith(
        "of the table on slide 3"
    )
    assert references.said_of_table("<p>These are numbers. The last row is ours:", said).endswith("row is ours:")
    assert references.is_table("<pre>a     b\n1     2</pre>") and not references.is_table("<pre>a = b\nb = a</pre>")
    for slide in deck(lesson)[2]:
        assert "table above" not in slide or references.is_table(slide.split("table above")[0])


POINTED_AT = {  # what a slide says of a picture or a diagram that is on another one
    "Look at the top timeline of the picture on slide 2.": "Look at the picture's top timeline.",
    "In the diagram on slide 10, this changes nothing": "In the diagram above, this changes nothing",
    "Look at the right half of the picture on slide": "Look at the figure's right half",
    "Count the copies in panel 5 of the picture on slides 2 and 3.": "Count the copies in panel 5.",
    "in the lower half of the picture on the slide before, each": "in the lower half of the picture, each",
    "In the upper half of the picture on the slide before, a forward": "In the upper half of the picture, a forward",
    "Follow rank 0 through the picture on slide 2.": "Follow rank 0 through the picture above.",
}


def test_a_picture_on_another_slide_is_named():
    shown = [" ".join(re.sub("</?[ib]>", "", slide).split()) for folder in LESSONS for slide in deck(folder)[2]]
    lessons = [" ".join((folder / "README.md").read_text(encoding="utf-8").split()) for folder in LESSONS]
    for said, written in POINTED_AT.items():
        assert sum(written in lesson for lesson in lessons) == 1, written
        assert sum(said in slide for slide in shown) == 1, said


def test_what_stands_beside_its_picture_or_leads_to_it_names_no_slide():
    picture = slides.Item("", "", '<figure><img alt="a"></figure>', 1, True)
    text = slides.Item("", "", "<p>Look at the picture:</p>", 1, True, "Look at the picture:")
    behind = text._replace(body="<p>Go through the picture, which is large.</p>", notes="")
    items = [picture, behind, text, picture, behind]
    said = [item.body for item in references.where_things_are(items, [(0, 2), (2, 3), (3, 4), (4, 5)])]
    assert said[:4] == [item.body for item in items[:4]] and "the picture on the slide before, which" in said[4]


def test_no_heading_at_the_foot_of_a_slide_begins_what_the_next_one_goes_on_with(lesson):
    items, places, _ = deck(lesson)
    at_the_foot, in_the_middle = [], []
    for start, end in places[:-1]:
        begun = any(item.place != items[end - 1].place for item in items[start:end])
        if begun and start and items[end].place == items[end - 1].place and items[end - 1].shown:
            at_the_foot.append(items[end - 1].place)
    for start, end in places[1:]:
        part = [(a, b) for a, b in zip(items[start:end], items[start + 1 : end]) if a.place != b.place]
        in_the_middle += [b.place for a, b in part if a.section != b.section or a.topic]
    assert len(at_the_foot) <= 1, at_the_foot
    assert len(in_the_middle) <= 1, in_the_middle
