"""Runs that other systems have published: profiles are fitted to some sources and judged on the others.

other_runs.csv holds 103 runs of ten sources with enough settings to repeat them, on 8 to 16,384 GPUs: MosaicML's
llm-foundry, NVIDIA's dgxc-benchmarking, torchtitan, Megatron-LM, BLOOM's sweep, Megatron's folding of experts, Llama 3,
DeepSeek-V3, GPT-NeoX and Nemotron-4. Its column `where` says where in the source; `assumed` names settings that the
source does not say, and `memory` marks rows that are known from memory only. MFU is not copied from anybody: all are
computed by one formula from tokens per second.
"""

import csv
import math
import re
import statistics
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common.errors import UsageError, first_line
from common.model_config import ModelConfig
from step08_5d.cost import Layout
from step08_5d.planning.fitting import descend, spearman
from step08_5d.planning.time.machines import MACHINES, Machine
from step08_5d.planning.time.profiles import PROFILES, RANGE, Profile
from step08_5d.planning.time.speed import AGAIN, mfu, times

FILE = Path(__file__).with_name("other_runs.csv")
# Systems from before FlashAttention write all scores of attention to memory, and no message of theirs hides. Nobody
# plans with them, but a third of the runs are theirs
EARLY = Profile("early", products=0.76, attention=0.030, hides=0.0)
DESCRIBED = PROFILES | {EARLY.name: EARLY}
FLASH_ATTENTION = 2205.14135  # its arXiv number: what has a smaller one did not know it
FITTED = {"fsdp": ("products", "attention", "hides"), "early": ("products", "attention")}
FITTED["megatron"] = FITTED["yours"] = FITTED["fsdp"]
START = {"products": 0.7, "attention": 0.15, "hides": 0.5}
LIMITS = {"products": 1.0, "attention": 0.3, "hides": 1.0}  # FlashAttention-3 alone reaches 0.3
FASTEST = Profile("fastest", **LIMITS, small=1.0)  # nobody computes faster
MOST = 1.6  # a run that is further off counts no more than this factor
CLOSE = 1.25  # a run within this factor is called predicted


class OtherRun(NamedTuple):
    """One published run."""

    id: str
    source: str
    system: str
    model: ModelConfig
    layout: Layout
    machine: Machine
    tokens_per_second: float  # of a GPU
    assumed: str  # settings that the source does not say
    profile: str  # the name of the one that describes such a system
    gpu: str  # what it ran on: `machine` may be another that is near it
    year: str  # "" if the source does not say

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.layout.tokens_per_gpu / self.tokens_per_second

    @property
    def mfu(self) -> float:
        return mfu(self.model, self.layout, self.seconds, self.machine)

    def ratio(self, profile: Profile) -> float:
        """Predicted over published speed."""
        return self.seconds / times(self.model, self.layout, self.machine, profile).step


# Columns that each run needs; those that may be empty or missing, and what they are then
NEEDED = ("gpu", "vocab", "hidden", "layers", "heads", "kv", "ffn", "micro_batch", "gbs", "seq", "tok_s_gpu")
WITHOUT = dict.fromkeys(("dp", "tp", "pp", "cp", "ep", "stages"), 1)
WITHOUT |= dict.fromkeys(("zero", "experts", "top_k", "shared", "dense_layers", "expert_ffn", "head_dim"), 0)


class _Row(NamedTuple):
    """A line of the file, whose cells are asked for by the names of their columns."""

    where: str
    cells: dict[str, str]

    def text(self, name: str, otherwise: str = "") -> str:
        return (self.cells.get(name) or otherwise).strip()

    def number(self, name: str, otherwise: float | None = None) -> float:
        """What a cell says, or `otherwise`; None: it must say something. Raises UsageError."""
        text = self.text(name, "" if otherwise is None else str(otherwise))
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (0 < number < math.inf or number == otherwise == 0 or number == 0 == WITHOUT.get(name)):
            raise self.wrong(name, f"{text!r} is no number above 0" if text else "is empty or missing")
        return number

    def whole(self, name: str) -> int:
        if (number := self.number(name, WITHOUT.get(name))) % 1:
            raise self.wrong(name, f"{number:g} is no whole number")
        return int(number)

    def wrong(self, name: str, why: str) -> UsageError:
        return UsageError(f"{self.where}, column {name}: {why}")


def read_runs(file: Path = FILE) -> list[OtherRun]:
    """Return all runs of a file with columns of other_runs.csv. Raises UsageError with the line and column at fault."""
    try:
        reader = csv.DictReader(file.open(encoding="utf-8-sig"))
        rows = [_Row(f"{file}, line {reader.line_num}", cells) for cells in reader]
    except (OSError, UnicodeError, csv.Error) as error:
        raise UsageError(f"{file} cannot be read: {first_line(error)}") from None
    if not rows:
        raise UsageError(f"{file} has no rows under a line with the columns {', '.join(NEEDED)}")
    return [_run(row) for row in rows]


def _run(row: _Row) -> OtherRun:
    text, whole = row.text, row.whole
    for name, known in {"gpu": MACHINES, "recompute": AGAIN}.items():
        if text(name, "none") not in known:
            raise row.wrong(name, f"{text(name)!r} is none of {', '.join(known)}")
    shape = {name: whole(name) for name in ("vocab", "hidden", "layers", "heads", "ffn", "experts", "top_k")}
    shape |= {name: whole(name) for name in ("dense_layers", "expert_ffn")}
    shape |= {"kv_heads": whole("kv"), "shared_experts": whole("shared"), "head_dim": whole("head_dim") or None}
    model = ModelConfig(**shape, tie_embeddings=text("tied") == "1", max_positions=whole("seq"))
    ways = {name: whole(name) for name in ("dp", "tp", "pp", "cp", "ep", "zero", "stages", "micro_batch")}
    count = max(1, round(whole("gbs") / ways["dp"] / ways["micro_batch"]))
    recompute = text("recompute", "none")
    layout = Layout(whole("seq"), **ways, micro_batches=count, dtype="bfloat16", recompute=recompute)
    gpus = layout.copies * layout.tp * layout.pp
    if row.number("gpus", gpus) != gpus:
        raise row.wrong("gpus", f"{text('gpus')}, but dp x tp x pp x cp are {gpus}")
    machine = MACHINES[text("gpu")]
    machine = machine._replace(far=1e9 * row.number("far", machine.far / 1e9), float8=text("precision") == "fp8")
    machine = machine._replace(memory_bandwidth=1e12 * row.number("membw", machine.memory_bandwidth / 1e12))
    note = text("note")
    if watts := re.search(r"(\d+) W\b", note):
        machine = machine._replace(power=int(watts[1]) / 700)  # of an H100
    source, system = text("source"), text("system")
    number = re.search(r"arXiv:(\d{4}\.\d{5})", source)
    old = "bigscience" in source or re.search(r"\b20(1\d|2[012])\b", system + text("where"))
    early = float(number[1]) < FLASH_ATTENTION if number else old
    sharded = layout.zero == 3 or re.search("FSDP|torchtitan", system)
    profile = "early" if early else "fsdp" if sharded else "megatron"
    speed, gpu = row.number("tok_s_gpu"), note.split(":")[0]
    year = f"20{number[1][:2]}" if number else (re.findall(r"(?<!\d)20[12]\d", system + text("where")) or [""])[0]
    described = text("assumed"), profile, gpu if gpu in MACHINES else machine.name, year
    found = OtherRun(text("id"), source, system, model, layout, machine, speed, *described)
    try:
        model.check()
    except UsageError as error:
        raise UsageError(f"{row.where}: {error}") from None
    if found.seconds < times(model, layout, machine, FASTEST).compute:
        raise row.wrong("tok_s_gpu", f"{speed:g} would be {found.mfu:.0%} MFU, more than {machine.name} can multiply")
    return found


def error(profile: Profile, runs: list[OtherRun]) -> float:
    """Mean of |log(predicted / published)|, in which n runs of a source count as much as sqrt(n)."""
    if any(getattr(profile, name) > limit for name, limit in LIMITS.items()):
        return math.inf
    sources = [run.source for run in runs]
    weights = [sources.count(source) ** -0.5 for source in sources]
    off = [min(math.log(MOST), abs(math.log(run.ratio(profile)))) for run in runs]
    return sum(map(math.prod, zip(weights, off))) / sum(weights)


def fitted(name: str, runs: list[OtherRun]) -> Profile:
    """The profile of this name, fitted to those of the runs that it describes; `yours` to all."""
    start = DESCRIBED.get(name, Profile("yours", **START))
    some = [run for run in runs if name in ("yours", run.profile)]
    start = start._replace(**{each: START[each] for each in FITTED[name]})
    return descend(start, FITTED[name], partial(error, runs=some), sweeps=6)


def unseen(runs: list[OtherRun]) -> dict[OtherRun, Profile]:
    """For each run, its profile, fitted to all sources but its own."""
    return {
        run: profile
        for source in dict.fromkeys(run.source for run in runs)
        for name in FITTED
        if (some := [run for run in runs if (run.source, run.profile) == (source, name)])
        for profile in [fitted(name, [run for run in runs if run.source != source])]
        for run in some
    }


class Judged(NamedTuple):
    """How good predictions are."""

    count: int
    median: float  # of predicted / published
    factor: float  # typical: the median of exp |log of that|
    close: float  # share of runs within a factor of CLOSE
    spearman: float  # of MFU

    @property
    def cells(self) -> tuple[str, ...]:
        ranks = f"{self.spearman:.2f}" if self.count > 2 else ""
        return (str(self.count), f"{self.median:.2f}", f"{self.factor:.2f}", f"{self.close:.0%}", ranks)


def judge(profiles: dict[OtherRun, Profile]) -> Judged:
    """Judge the predictions for these runs, each by its own profile."""
    ratios = [run.ratio(profile) for run, profile in profiles.items()]
    factors = [math.exp(abs(math.log(ratio))) for ratio in ratios]
    published = [run.mfu for run in profiles]
    ranks = spearman(published, [a * b for a, b in zip(published, ratios)]) if len(ratios) > 2 else math.nan
    close = sum(each <= CLOSE for each in factors) / len(factors)
    return Judged(len(ratios), statistics.median(ratios), statistics.median(factors), close, ranks)


def outside(runs: list[OtherRun]) -> list[OtherRun]:
    """Runs that are slower than by any profile, or faster."""
    ratios = {run: [run.ratio(each) for each in RANGE] for run in runs}
    return [run for run, predicted in ratios.items() if not min(predicted) <= 1 <= max(predicted)]
