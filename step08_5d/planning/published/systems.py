"""What runs of other systems say, as a report: each profile's evidence, what it misses, and what a range covers."""

from pathlib import Path

from common.drawing.figures import COLOURS, SERIES, new_figure, write_png
from common.drawing.tables import print_table
from step08_5d.planning.published.others import (
    CLOSE,
    FITTED,
    OtherRun,
    error,
    fitted,
    judge,
    outside,
    read_runs,
    unseen,
)
from step08_5d.planning.time.profiles import PROFILES, RANGE, TUNED, Profile

Profiles = dict[OtherRun, Profile]
JUDGED = ("runs", "predicted / published", "typical factor", f"within {CLOSE - 1:.0%}", "Spearman")


def print_systems(path: Path) -> None:
    """Fit each profile to all sources but one, judge it on that one, and so on in turn; draw the figure."""
    runs = read_runs()
    print(f"\n{len(runs)} runs of {len({run.source for run in runs})} other sources")
    fresh, nanotron = unseen(runs), dict.fromkeys(runs, PROFILES["nanotron"])
    print_profiles(runs, fresh)
    rows = [("by nanotron's habits", *judge(nanotron).cells), ("by the right profile", *judge(fresh).cells)]
    print_table("all runs, from other sources than their own", ("", *JUDGED), rows)
    print_sources(fresh, nanotron)
    print_misses(fresh)
    print_range(runs)
    print(f"  figure: {draw(fresh, path)}")


def print_yours(file: Path) -> None:
    """Which profile describes somebody's own runs best, and the one that is fitted to them."""
    runs, numbers = read_runs(file), FITTED["yours"]
    different = len({(run.model, run.layout, run.machine) for run in runs})
    choices = [*PROFILES.values(), TUNED]
    choices += [fitted("yours", runs)] if different >= len(numbers) else []
    rows = [(each.name, *judge(dict.fromkeys(runs, each)).cells) for each in choices]
    print_table(f"{file}, by each profile; `yours` has seen these runs", ("", *JUDGED), rows)
    if (yours := choices[-1]).name == TUNED.name:
        print(f"  your own {', '.join(numbers)} are not determined by fewer than {len(numbers)} different runs")
        return
    print(f"  to plan with it: --profile {','.join(f'{getattr(yours, each):.2g}' for each in numbers)}")
    for name in numbers:
        if error(yours, runs) == error(yours._replace(**{name: 0.9 * getattr(yours, name)}), runs):
            print(f"  {name} is not determined by these runs, which it makes no difference to")


def print_profiles(runs: list[OtherRun], fresh: Profiles) -> None:
    """The fitted numbers of each profile, and its errors on seen and on unseen sources."""
    rows = []
    for name in dict.fromkeys(run.profile for run in runs):
        numbers, profile, some = FITTED[name], fitted(name, runs), [run for run in runs if run.profile == name]
        values = ", ".join(f"{each} {getattr(profile, each):.2g}" for each in numbers)
        seen, others = (judge({run: choice[run] for run in some}) for choice in (dict.fromkeys(some, profile), fresh))
        rows.append((name, values, len({run.source for run in some}), f"{seen.factor:.2f}", *others.cells))
    title = "profiles, and how far off they are on sources that their fit has not seen"
    print_table(title, ("", "fitted", "sources", "seen: factor", *JUDGED), rows)


def print_sources(fresh: Profiles, nanotron: Profiles) -> None:
    """Each source, by profiles that have not seen it, and by nanotron's."""
    rows = []
    for source, name in dict.fromkeys((run.source, run.profile) for run in fresh):
        some = [run for run in fresh if (run.source, run.profile) == (source, name)]
        judged, other = (judge({run: choice[run] for run in some}) for choice in (fresh, nanotron))
        rows.append((source, name, *judged.cells, f"{other.median:.2f}", f"{other.factor:.2f}"))
    header = ("unseen", "profile", *JUDGED, "as nanotron: median", "factor")
    print_table("by source", header, rows)


def print_misses(fresh: Profiles) -> None:
    """The runs that an unseen profile misses, with what had to be assumed."""
    rows = []
    for run, profile in fresh.items():
        ratio = run.ratio(profile)
        if max(ratio, 1 / ratio) > CLOSE:
            rows.append((run.id, run.profile, f"{run.mfu:.1%}", f"{run.mfu * ratio:.1%}", run.assumed))
    print_table("missed", ("", "profile", "published MFU", "predicted", "assumed"), rows)


def print_range(runs: list[OtherRun]) -> None:
    """What the range covers, and what it does not."""
    missed = outside(runs)
    rows = []
    for run in missed:
        guesses = [run.mfu * run.ratio(each) for each in RANGE]
        rows.append((run.id, f"{run.mfu:.1%}", f"{min(guesses):.1%} ... {max(guesses):.1%}"))
    share = 1 - len(missed) / len(runs)
    title = f"slowest ... fastest of the profiles covers {share:.0%} of the runs. Outside are"
    print_table(title, ("", "published MFU", "predicted"), rows)


def draw(fresh: Profiles, path: Path) -> Path:
    """Published over predicted MFU, by nanotron's habits and by profiles that have not seen the source."""
    figure, axes = new_figure(1, 2, height=3.2, sharex=True, sharey=True)
    titles = {"as nanotron": dict.fromkeys(fresh, PROFILES["nanotron"]), "by a profile of its kind": fresh}
    for axis, (title, profiles) in zip(axes, titles.items()):
        for name, color in zip(sorted({run.profile for run in fresh}, key=[*FITTED].index), SERIES):
            some = [run for run in fresh if run.profile == name]
            guesses = [run.mfu * run.ratio(profiles[run]) for run in some]
            axis.plot(guesses, [run.mfu for run in some], ".", ms=5, color=color, label=name)
        axis.plot([0, 0.7], [0, 0.7], color=COLOURS["other"], lw=1)
        axis.set(title=title, xlabel="MFU, predicted", xlim=(0, 0.7), ylim=(0, 0.7))
    axes[0].set_ylabel("MFU, published")
    axes[1].legend(loc="lower right", fontsize=8)
    return write_png(figure, path)
