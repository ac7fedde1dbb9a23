"""Which of a paragraph's sentences stand on a slide: those in bold, those that lead to what is shown, or the first.

Each must be understood alone, so a question takes its answer along, and "This makes it slower" what is before it.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

END = re.compile(r"(?:(?<=[.?!])|(?<=[.?!][*)\"])|(?<=[.?!]\*\*))\s+(?=[A-Z*`(\"\d])")
CLAIM = re.compile(r"\*\*[^*]*[.?!]\*\*\Z")
POINTS_BACK = re.compile(  # at what was said before; a bracket does so, too
    r"\(|[*]*(?:That|Those|Their|Then|So|But|And|Both|Therefore|Otherwise|Such|There|He|Neither|Nothing|In both)\b"
    r"|[*]*(?:Meanwhile|Instead|Afterwards|Only then|What is left|(?:In|On) the other|Here,|On average,)(?!\w)"
    r"|[*]*(?:The (?:first|second|third|other|latter|last|two|only|rest|remaining|same)|In words)\b"
    r"|[*]*For (?:the|instance|both)\b"
    r"|[*]*One (?:is|has|holds|takes|sends|of|call|that)\b|[*]*(?:A|The) \w+er one\b"
    r"|[*]*Each (?:half|third|quarter)\b|[*]*The (?:only )?exception (?:is|are)\b|.*\bthe (?:one|only) exception\b"
    r"|[^.,]{1,40}, that (?:is|was|makes|leaves)\b|.*\b(?:is|are|has|have) then\b(?!,)"
    r"|[*]*(?:[\w'`-]+,? ){0,4}(?:[Ii]ts?|[Tt]hey|[Tt]hem|[Tt]hese|[Tt]his(?! is (?:how|what)| lesson| step))\b(?!\*)"
    r"|[*]*(?:[\w'`]+ ){1,3}(?:also|too)\b|[*]*In the same way,"
    r"|.*\b(?:neither|both|as (?:many|much|long)|(?:one|two|three) more|the same (?:problem|two|three))[,.;:]"
    r"|.*\b(?:(?:one|two|three) more, which|the same (?:problem|three)|such (?!as|an?\b)|too[.:])"
    r"|.*\b(?:(?:one|two|three|four) of them|another (?:two|three|four)|earlier|later|sooner)[,.:;]"
    r"|.*\b(?:enclosed|followed|preceded) by (?:one|two|both) of them\b|[*]*Compare the two\b"
    r"|[*]*The model (?:has|is)\b|[*]*(?:(?:Now|Then) )?[Ww]e \w+ their\b"
    r"|(?!.*\b(?:one|first|half|part|some|quarter|third|eighth)\b.*\bthe (?:rest|other)\b)"
    r".*\b(?:the rest(?! of)|the other (?:\d|two|three|four))\b"
    r"|.*\b(?:is|are) (?:faster|slower|larger|smaller|longer|shorter)(?: if\b|[.,:;])"
)
AMOUNT = re.compile(r"(?<![\w.,])(?<!= )\d[\d,]*(?:\.\d+)? (?:%|[bm]illion\b|[GM]i?B\b)")  # to which a text returns
ASKS_BACK = re.compile(r"(?:.*\b(?:that|this|it|so|they|them|these|those|then|whom)\b|.{,24}\Z)", flags=re.IGNORECASE)
SCENE = re.compile(r"[*]*(?:Think of|Imagine|Suppose|Picture|(?:Now l|L)et)\b")  # which the next sentence speaks of
SETS_OUT = re.compile(r"[*]*(?:To test (?:it|this)\b|One \w+ remains\b)")  # for what is said at the paragraph's end
ELSEWHERE = re.compile(r".*\b(?:one|both|all|none) of these (?:two|three|four)\b")  # named in the paragraph before
SECOND = re.compile(r"[*]*Second(?:ly)?,")
COUNTED = re.compile(  # which follow
    r".*(?<!in )\b(two|three|four|five) (?:\w+ )?(?:ways|things|reasons|wishes)\b(?!.*:\Z)", flags=re.IGNORECASE
)
NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5}
ANSWER = re.compile(r"(?:No|Yes|Not|Because)\b.{,20}\Z")  # to a question
TERM = re.compile(r"(?<!^)\*\*[^*]*[^*.?!:,]\*\*")  # in bold, not as a heading: what it means is said here
THINGS = re.compile(
    r"\W*(?:(?:In|On|For|At|With|From) )?[Tt]he \**([\w-]+)(?: ([\w-]+))?"
)  # by which a sentence begins
ALL = re.compile(r"\b[Aa]ll (?:two|three|four|five|six|seven|eight|\d+) (\w+?)s\b")  # of what was said to be so many
WORDS = 3  # shorter ones in bold are headings
# Letters: of one that says little alone, of one that may lead to what is shown, of what leads to commands, of what will
# do, of the most with what follows, and with what is before
SHORT, LEADING, COMMANDS, ENOUGH, LONG, LONGEST = 50, 80, 215, 100, 270, 640
# Of captions: where one says what to look at, and where it comes to the lower of two pictures
LOOK = re.compile(r"(?:Look|Watch|Follow|Compare)\b")
LOWER = re.compile(r"Below\b|(?:At|In) the (?:bottom|lower)|The lower")
PANEL = re.compile(
    r"(?:Above|Below|Left|Right)\b|(?:At|In|On) the (?:top|bottom|upper|lower|left|right)\b(?! of)|The lower\b"
)
HALF = re.compile(r"\A(?:Above|Below|(?:In|At) the (?:top|bottom|upper|lower)(?: (?:half|picture))?)[,:] (\w)")


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


class Captions(NamedTuple):
    """What is said below a picture, below its halves where it takes two slides, and below its animation."""

    whole: str
    upper: str
    lower: str
    moving: str


def points(
    paragraph: str, leads: bool, opens: bool = False, is_meant: bool = False, leading: int = LEADING
) -> list[str]:
    """What a slide says of a paragraph in any case.

    `leads` if it leads to what the slide shows, with at least `leading` letters; `opens` if it opens a lesson,
    `is_meant` if what follows points back at its end.
    """
    if is_item(paragraph):
        return [first_sentences(paragraph, SHORT)]
    if paragraph.startswith(">"):
        return [paragraph]
    sentences, chosen = split(paragraph), set()
    for at, sentence in enumerate(sentences):
        if CLAIM.match(sentence) and len(sentence.split()) >= WORDS:
            asks = at == 0 or is_question(sentence)
            chosen |= with_next(sentences, at) if asks else with_previous(sentences, at)
        elif TERM.search(sentence):
            chosen |= with_previous(sentences, at)
        elif SETS_OUT.match(sentence):
            chosen |= with_next(sentences, at)
    if opens:
        chosen |= with_next(sentences, 0)
    if leads:
        chosen |= with_previous(sentences, len(sentences) - 1, leading)
    if is_meant:
        chosen |= with_previous(sentences, len(sentences) - 1)
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


def begins_back(paragraph: str, said: list[str]) -> bool:
    """Whether what a slide says of a paragraph begins with its first sentence, and points at the one before it."""
    first = split(paragraph)[0]
    begins = bool(said) and not is_item(paragraph) and said[0].startswith(first)
    return begins and (needs(first, "") or any(map(ELSEWHERE.match, split(said[0]))))


def needs(sentence: str, previous: str) -> bool:
    """Whether a sentence is understood only after the previous one, "" where that is of another paragraph."""
    things, whole = THINGS.match(sentence), ALL.search(sentence)
    if is_question(sentence):
        return bool(POINTS_BACK.match(sentence) or ASKS_BACK.match(sentence) or SCENE.match(previous))
    return bool(
        POINTS_BACK.match(sentence)
        or is_question(previous)
        or ANSWER.match(previous)
        or SCENE.match(previous)
        or COUNTED.match(previous)
        or SECOND.match(sentence)
        or whole
        and re.search(rf"\b{whole[1]}\b", previous)
        or things
        and any(re.search(rf"\b[Aa]n? (?:[\w-]+ ){{0,2}}{thing}\b", previous) for thing in things.groups() if thing)
    )


def is_question(sentence: str) -> bool:
    return sentence.rstrip("*").endswith("?")


def with_next(sentences: list[str], at: int, enough: int = ENOUGH) -> set[int]:
    """A sentence and the next ones, until they say enough, and all the things that it counts."""
    chosen, letters, last = {at}, len(sentences[at]), at + counted(sentences, at)
    for following in range(at + 1, len(sentences)):
        done = letters >= enough and not is_question(sentences[following - 1]) and following > last
        letters += len(sentences[following])
        if done or letters > (LONG if following > last else LONGEST):
            break
        chosen.add(following)
        last = max(last, following + counted(sentences, following))
    return chosen


def counted(sentences: list[str], at: int) -> int:
    """How many of the next sentences say what a sentence promises: two ways, or a first without second."""
    if found := COUNTED.match(sentences[at]):
        return NUMBERS[found[1].lower()]
    if SETS_OUT.match(sentences[at]):
        return len(sentences)
    second = next((more for more, each in enumerate(sentences[at:]) if SECOND.match(each)), 0)
    return second if re.match(r"[*]*First,", sentences[at]) else 0


def with_previous(sentences: list[str], at: int, enough: int = SHORT, short: int = SHORT) -> set[int]:
    """A sentence, what it points back at, and what is before a `short` one."""
    chosen, letters = {at}, len(sentences[at])
    while at and (
        not is_question(sentences[at])
        and (letters < enough or len(sentences[at]) < short)
        or needs(sentences[at], sentences[at - 1])
        or takes_up(sentences, chosen)
    ):
        at -= 1
        letters += len(sentences[at])
        if letters > LONGEST and not COUNTED.match(sentences[at]):
            break
        chosen.add(at)
    return chosen


def takes_up(sentences: list[str], chosen: set[int]) -> bool:
    """Whether an amount that is chosen has been said before that, near enough to say it, too."""
    text = " ".join(sentences[at] for at in sorted(chosen))
    again = [re.compile(rf"(?<![\w.,]){re.escape(amount)}") for amount in set(AMOUNT.findall(text))]
    since = next((at for at in range(min(chosen)) if any(each.search(sentences[at]) for each in again)), None)
    return since is not None and sum(map(len, sentences[since : min(chosen)])) + len(text) <= LONGEST


def joined(sentences: list[str], chosen: set[int]) -> Iterator[str]:
    """The chosen sentences; those that follow each other as one."""
    run: list[str] = []
    for at in range(len(sentences) + 1):
        if at in chosen:
            run.append(sentences[at])
        elif run:
            yield " ".join(run)
            run = []


def captions(text: str) -> Captions:
    """What a slide says of a caption, and of its parts where the picture or its animation has slides of its own.

    A half's sentence does not say "below", because nothing is below it there. An animation is told where to look.
    """
    sentences = split(text.replace("**", ""))
    first = with_next(sentences, 0)
    starts = [at for at, sentence in enumerate(sentences) if PANEL.match(sentence)]
    panels = [with_next(sentences, at, SHORT) | with_previous(sentences, at, 0, 0) for at in starts]
    end = next((at for at, sentence in enumerate(sentences) if LOWER.match(sentence)), max(first) + 1)
    upper, lower = sentences[:end] or sentences, sentences[end:] or sentences
    top = with_next(upper, 0).union(*panels) & set(range(len(upper)))
    look = next((at for at, sentence in enumerate(sentences) if LOOK.match(sentence)), None)
    moving = sentences[look:] if look is not None else lower
    return Captions(
        " ".join(joined(sentences, first.union(*panels))),
        *(" ".join(joined([*map(alone, half)], said)) for half, said in ((upper, top), (lower, with_next(lower, 0)))),
        " ".join(joined(moving, with_next(moving, 0))),
    )


def alone(words: str) -> str:
    """A sentence about a half of a picture, without the words for where on the page that is."""
    words = HALF.sub(lambda found: found[1].upper(), re.sub(r"\A(?:Above|Below) on the", "On the", words))
    return re.sub(r"\b(T|t)he (?:upper|lower) picture\b", r"\1his picture", words)
