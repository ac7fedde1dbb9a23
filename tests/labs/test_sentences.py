"""What a slide takes along, so that it can be understood alone, and where it begins."""

import pytest

from common.labs import find, references, sentences, slides

LESSONS = [path.parent for path in sorted(find.ROOT.glob("step*/README.md"))]


@pytest.fixture(params=LESSONS, ids=lambda path: path.name, scope="module")
def lesson(request):
    return request.param


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
    items = slides.items_of_lesson(lesson)
    places = slides.divided(items)
    named = references.where_tables_are(items, places)
    for start, end in places:
        slide = slides.drawn(named, start, end, "").split("<aside>")[0]
        assert "table above" not in slide or references.is_table(slide.split("table above")[0])


def test_no_heading_at_the_foot_of_a_slide_begins_what_the_next_one_goes_on_with(lesson):
    items, at_the_foot = slides.items_of_lesson(lesson), []
    places = slides.divided(items)
    for start, end in places[:-1]:
        begun = any(item.place != items[end - 1].place for item in items[start:end])
        if begun and start and items[end].place == items[end - 1].place and items[end - 1].shown:
            at_the_foot.append(items[end - 1].place)
    assert len(at_the_foot) <= 1, at_the_foot
