"""What explanations look at, and the words that they are made of."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.lockstep.compare import Difference
from common.lockstep.notes import Note, Seen, Whole

# Names to prefer, where groups have the same ranks
GROUPS = "tp cp dp dp_cp ep edp pp_forward shard replica kv_replica embed mirror".split()
AXES = {2: ("sample", "position"), 3: ("sample", "position", "feature"), 4: ("sample", "head", "position", "feature")}


@dataclass(frozen=True)
class Context:
    """What explanations look at."""

    difference: Difference
    whole: Whole
    seen: dict[int, Seen]
    notes: dict[tuple, list[tuple[int, Note]]]

    def groups_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """A rank's groups of several ranks, each set of ranks once, under its best known name."""
        mine = self.seen[rank].groups
        names = sorted(mine, key=lambda name: (GROUPS.index(name) if name in GROUPS else len(GROUPS), name))
        found: dict[tuple[int, ...], str] = {}
        for name in names:
            found.setdefault(tuple(sorted(mine[name])), name)
        return {name: ranks for ranks, name in found.items()}


def listed(numbers: Sequence[int]) -> str:
    """1, 2 and 5"""
    words = [str(each) for each in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def ranges(numbers: Sequence[int]) -> str:
    """0-3, 8-11: in the order of the numbers, which need not ascend."""
    parts: list[list[int]] = []
    for number in map(int, numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    words = [str(low) if low == high else f"{low}-{high}" for low, high in parts]
    return ", ".join(words if len(words) <= 6 else [*words[:5], "...", words[-1]])


def axis_name(context: Context, axis: int) -> str:
    """What an axis of the tensor is."""
    _, phase, name = context.difference.key
    dims = len(context.difference.wrong[0].place)
    if phase in ("forward", "backward") and not name.endswith("weight") and dims in AXES:
        return AXES[dims][axis]
    return "row" if axis == 0 else "column" if axis == 1 and dims == 2 else f"index {axis}: number"
