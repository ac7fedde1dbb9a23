"""Which of a paragraph's sentences stand on a slide: those in bold, those that lead to what is shown, or the first.

Each must be understood alone, so a question takes its answer along, and "This makes it slower" what is before it.
"""

import re
from collections.abc import Iterator

END = re.compile(r"(?:(?<=[.?!])|(?<=[.?!][*)\"])|(?<=[.?!]\*\*))\s+(?=[A-Z*`(\"\d])")
CLAIM = re.compile(r"\*\*[^*]*[.?!]\*\*\Z")
POINTS_BACK = re.compile(  # at what was said before; a bracket does so, too
    r"\(|[*]*(?:That|Those|Their|Then|So|But|And|Both|Therefore|Otherwise|Such|There|He|Neither|Nothing|In both)\b"
    r"|[*]*(?:The (?:second|third|other|latter|two)|Only then)\b"
    r"|[*]*(?:[\w']+ ){0,3}(?:[Ii]ts?|[Tt]hey|[Tt]hem|[Tt]hese|[Tt]his(?! is (?:how|what)))\b(?!\*)"
)
WORDS = 3  # shorter ones in bold are headings
# Letters: of one that says little alone, of one that may lead to what is shown, of what will do, of the most with what
# follows, and with what is before
SHORT, LEADING, ENOUGH, LONG, LONGEST = 50, 80, 100, 270, 340


def split(paragraph: str) -> list[str]:
    """The sentences of a paragraph in Markdown. One that ends in the middle of a bracket or of bold goes on."""
    found: list[str] = []
    for part in END.split(" ".join(paragraph.split())):
        if found and (
            re.fullmatch(r"\d+\.", found[-1])
            or found[-1].count("**") % 2
            or found[-1].count("(") > found[-1].count(")")
        ):
            found[-1] += " " + part
        else:
            found.append(part)
    return found


def points(paragraph: str, leads: bool, opens: bool = False) -> list[str]:
    """What a slide says of a paragraph in any case; `leads` if it leads to what the slide shows, `opens` a lesson."""
    if is_item(paragraph):
        return [first_sentences(paragraph, SHORT)]
    if paragraph.startswith(">"):
        return [paragraph]
    sentences, chosen = split(paragraph), set()
    for at, sentence in enumerate(sentences):
        if CLAIM.match(sentence) and len(sentence.split()) >= WORDS:
            asks = at == 0 or is_question(sentence)
            chosen |= with_next(sentences, at) if asks else with_previous(sentences, at)
    if opens:
        chosen |= with_next(sentences, 0)
    if leads:
        chosen |= with_previous(sentences, len(sentences) - 1, LEADING)
    return list(joined(sentences, chosen))


def first_sentences(paragraph: str, enough: int = ENOUGH) -> str:
    """The sentence that introduces a term, or the first one, and what it takes along."""
    sentences = split(paragraph)
    terms = [at for at, sentence in enumerate(sentences) if "**" in sentence]
    at = terms[0] if terms and not is_item(paragraph) else 0
    chosen = with_next(sentences, at, enough) | (with_previous(sentences, at) if at else set())
    return " ".join(joined(sentences, chosen))


def is_item(paragraph: str) -> bool:
    """Whether it is an item of a list."""
    return re.match(r"- |\d+\. ", paragraph) is not None


def is_fragment(sentence: str) -> bool:
    return len(sentence) < SHORT or is_question(sentence)


def is_question(sentence: str) -> bool:
    return sentence.rstrip("*").endswith("?")


def with_next(sentences: list[str], at: int, enough: int = ENOUGH) -> set[int]:
    """A sentence and the next ones, until they say enough."""
    chosen, letters = {at}, len(sentences[at])
    for following in range(at + 1, len(sentences)):
        done = letters >= enough and not is_question(sentences[following - 1])
        letters += len(sentences[following])
        if done or letters > LONG:
            break
        chosen.add(following)
    return chosen


def with_previous(sentences: list[str], at: int, enough: int = SHORT) -> set[int]:
    """A sentence, and what it points back at."""
    chosen, letters = {at}, len(sentences[at])
    while at and (letters < enough or is_fragment(sentences[at]) or POINTS_BACK.match(sentences[at])):
        at -= 1
        letters += len(sentences[at])
        if letters > LONGEST:
            break
        chosen.add(at)
    return chosen


def joined(sentences: list[str], chosen: set[int]) -> Iterator[str]:
    """The chosen sentences; those that follow each other as one."""
    run: list[str] = []
    for at in range(len(sentences) + 1):
        if at in chosen:
            run.append(sentences[at])
        elif run:
            yield " ".join(run)
            run = []


def short_captions(caption: str) -> tuple[str, str]:
    """The first sentences of a caption; and the next ones, if there are any, for a picture's second half."""
    sentences = split(caption.replace("**", ""))
    first = with_next(sentences, 0)
    rest = sentences[max(first) + 1 :] or sentences
    return " ".join(joined(sentences, first)), " ".join(joined(rest, with_next(rest, 0)))
