"""Two tables to write in step 5: with whole backwards, and with backwards that are split."""

from step05_pipeline.labs.tables import Case, Tables
from step05_pipeline.schedules.simulator import Costs

LABS = [
    Tables(
        id="schedule-05-a",
        title="A pipeline that keeps its memory low",
        minutes=25,
        task="""\
Write the order in which each rank works, as a table. `schedule.csv` says for how many ranks and micro-batches, what
each action costs, how much time you have, and how many micro-batches a rank may have in memory between its F and its B.
Leave backwards whole.

`check` plays your table, says what it holds and where it waits, and draws it (`schedule.png`), once it has passed
beside the best one that we know. A table that cannot run is told who waits for whom.

*Before:* lesson 5 up to 1F1B; `python -m step05_pipeline.schedules --schedule afab --pp 4 --micro-batches 8` draws one.
*Graded:* 0.2 for a table that runs, the rest for time and memory.
""",
        hints=(
            "Do all forwards first, and look at how much the first rank holds. Which of its actions gives memory back?",
            "The last rank can do B0 right after F0. How many forwards must a rank before it have done by then, if "
            "it is not to wait?",
            "Rank r of p begins with p - r forwards, or with as many as it may hold, then takes turns: one backward, "
            "one forward; the backwards that are left come last. If memory is so short that it would wait for its next "
            "forward, it does a backward that can run first.",
        ),
        cases=(
            Case(3, 6, Costs(), 3),
            Case(4, 6, Costs(), 4),
            Case(3, 7, Costs(F=2, I=2, W=1), 3),
            Case(4, 5, Costs(F=1, I=2, W=1), 4),
            Case(4, 6, Costs(), 2),  # less memory than 1F1B takes: how much time does that cost?
            Case(4, 7, Costs(F=2, I=2, W=1), 3),
        ),
        split=False,
    ),
    Tables(
        id="schedule-05-b",
        title="Fill the bubble with weight gradients",
        minutes=40,
        task="""\
Write the order in which each rank works, as a table, in less time than 1F1B takes: split backwards into I (the gradient
of the input, for which the previous rank waits) and W (that of the weights, for which nobody waits). `schedule.csv` has
the ranks and micro-batches, the time of each action, how much time you have, and how many micro-batches a rank may have
in memory. Memory counts from F until the gradients of that micro-batch are complete: a late W holds it longer.

`check` plays your table, says what it holds and where it waits, and draws it (`schedule.png`), once it has passed
beside the best one that we know. A table that cannot run is told who waits for whom.

*Before:* lesson 5, ZB-H1. *Graded:* 0.2 for a table that runs, the rest for time and memory.
""",
        hints=(
            "Start from 1F1B with each B written as I, W. Where does a rank wait, and which W could it do then?",
            "An I on the way to the first rank should never stand behind a W: move each W behind what others wait for.",
            "Put off each W as long as memory lets you: on every rank, do one when the next F would not fit in, and, "
            "after the last F, one behind each I, where the first rank would wait anyway. The Ws that are left come "
            "last.",
        ),
        cases=(
            Case(3, 6, Costs(), 3),
            Case(4, 6, Costs(), 4),
            Case(3, 5, Costs(F=2, I=2, W=1), 3),
            Case(4, 7, Costs(F=1, I=2, W=1), 4),
            Case(3, 6, Costs(), 5),  # more memory than 1F1B takes: what can it buy?
            Case(4, 8, Costs(), 7),
        ),
    ),
]
