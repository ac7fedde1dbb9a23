"""What a step of ZeRO must hold, send and do, and when: formulas, and checks of an `Observation` against them.

Nothing here asks the mechanism: sizes are those of the model, units follow from the rules of the design (buckets of so
many MB, in stage 3 a region each). Each check raises AssertionError with a message that begins with its name.
`test_accounting.py` runs all of them on the mechanism, `tests/mutants` on known-wrong variants of it.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from common.config import TrainConfig
from common.model import Decoder
from step01_single_gpu.memory_model.capacity import bytes_needed
from tests.harness.accounting import fill_buckets
from tests.mechanisms.step03.observe import OTHERS, Observation

REDUCING = 2  # reduce-scatters that a rank has in flight over gloo


class FormulaUnit(NamedTuple):
    """Parameters that are reduced together, by name, and how many elements of them a rank has, padding included."""

    names: tuple[str, ...]
    share: int


@dataclass
class Plan:
    """What one configuration means on `world` ranks."""

    config: TrainConfig
    world: int

    def __post_init__(self):
        config, model = self.config, Decoder(self.config.model_config)
        self.stage, self.layers = config.zero, len(model.layers)
        self.replicas = config.zero_replicas if self.stage else self.world
        self.ranks = self.world // self.replicas  # over which ZeRO shards
        self.itemsize, self.wide = config.torch_dtype.itemsize, max(4, config.torch_dtype.itemsize)
        self.states = 2 * self.wide + (self.wide if self.wide != self.itemsize else 0)  # moments; a master copy
        self.micro_batches = config.accumulation_steps
        self.sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}  # in forward order
        names = {parameter: name for name, parameter in model.named_parameters()}
        modules = [[model.embedding], *([layer] for layer in model.layers.values()), [model.norm, model.head]]
        self.regions = [[names[each] for module in some for each in module.parameters()] for some in modules]
        self.parameters = sum(self.sizes.values())
        groups = [(tuple(names), sum(self.sizes[name] for name in names)) for names in self._groups()]
        self.units = [FormulaUnit(names, math.ceil(size / self.ranks)) for names, size in groups]  # as they are reduced

    def _groups(self) -> list[list[str]]:
        if self.stage == 3:  # the region that needs a parameter first has it
            own, seen = [], set()
            for region in self.regions:
                own.append([name for name in region if name not in seen])
                seen.update(region)
            return own[::-1]
        names, limit = list(self.sizes), self.config.bucket_mb * 1e6 / self.wide
        return [[names[index] for index in bucket] for bucket in fill_buckets(list(self.sizes.values()), limit)]

    def units_of(self, region: int) -> list[FormulaUnit]:
        return [unit for unit in self.units if set(unit.names) & set(self.regions[region])]

    @property
    def padded(self) -> int:
        return sum(unit.share for unit in self.units) * self.ranks

    @property
    def reductions(self) -> int:
        """Reduce-scatters of each unit in a step."""
        return self.micro_batches if self.stage >= 2 and self.config.zero_reduce == "micro-batch" else 1

    def gathers(self) -> list[tuple[str, int, FormulaUnit]]:
        """Those of one micro-batch (stages 1 and 2: of a step) in order: what waits for it ("forward" or "backward" of
        which region), and what it brings."""
        if self.ranks == 1:
            return []
        if self.stage < 3:
            first = {unit: i for i in reversed(range(len(self.regions))) for unit in self.units_of(i)}
            return [("forward", first[unit], unit) for unit in reversed(self.units)]
        # The last region stays until its backward, and the backward of the embedding needs no weights
        forward = [("forward", i, unit) for i in range(len(self.regions)) for unit in self.units_of(i)]
        return forward + [("backward", i, unit) for i in range(self.layers, 0, -1) for unit in self.units_of(i)]

    def calls(self) -> dict[str, list[tuple]]:
        """(group, elements, dtype, bytes sent) of each operation in a step, in order."""
        narrow, n, r = self.config.dtype, self.ranks, self.replicas
        wide = narrow if self.wide == self.itemsize else "float32"
        gathers = [("shard", unit.share, narrow, (n - 1) * unit.share * self.itemsize) for _, _, unit in self.gathers()]
        scatters = [("shard", n * unit.share, wide, (n - 1) * unit.share * self.wide) for unit in self.units]
        sums = [("replica", unit.share, wide, 2 * (unit.share * self.wide * (r - 1) // r)) for unit in self.units]
        # The gradient norm, then the loss: one float64 each
        last = [(group, 1, "float64", 2 * (8 * (self.world - 1) // self.world)) for group in ("world", "dp_cp")]
        return {
            "all_gather": gathers * (self.micro_batches if self.stage == 3 else 1),
            "reduce_scatter": scatters * self.reductions if n > 1 else [],
            "all_reduce": (sums if r > 1 else []) + last,
        }


# ---- checks of one rank ----------------------------------------------------------------------------------------------


def check_calls(seen: Observation, plan: Plan) -> None:
    """Operations, groups, number, sizes and bytes, in order."""
    expected, found = plan.calls(), {call.op for call in seen.calls}
    assert found <= expected.keys(), f"calls: {sorted(found)}"
    for op, wanted in expected.items():
        found = [(call.group, call.elements, call.dtype, call.bytes) for call in seen.of(op)]
        assert len(found) == len(wanted), f"calls: {len(found)} x {op} instead of {len(wanted)}"
        assert found == wanted, f"calls: {op} {found} instead of {wanted}"


def check_wire(seen: Observation, plan: Plan) -> None:
    """Bytes that the kernel counted on this rank's sockets."""
    if seen.on_wire is not None:
        ratio = seen.on_wire / sum(call[3] for calls in plan.calls().values() for call in calls)
        assert abs(ratio - 1) < 0.02, f"wire: {seen.on_wire} bytes, {ratio:.3f} of the formula"


def check_bytes_held(seen: Observation, plan: Plan) -> None:
    """Parameters, gradients and optimizer state, right before the update and after the step."""
    whole, shard = plan.padded, plan.padded // plan.ranks
    parameters = (shard if plan.stage == 3 else whole) * plan.itemsize
    gradients = (shard if plan.stage >= 2 else whole) * plan.wide
    most = shard * plan.states + 4 * len(plan.sizes)  # and a step counter for each tensor
    for moment, held in seen.held.items():
        assert held["parameters"] == parameters, f"bytes held: {held['parameters']} of parameters, not {parameters}"
        expected = gradients if moment == "before the update" else 0
        assert held["gradients"] == expected, f"bytes held: {held['gradients']} of gradients, not {expected}, {moment}"
        assert held["optimizer"] <= most, f"bytes held: {held['optimizer']} of optimizer state, not {most}"
        assert held["others"] < OTHERS, f"bytes held: {held['others']} that are none of these, {moment}"


def check_residency(seen: Observation, plan: Plan) -> None:
    """Stage 3 holds at most two neighbouring regions beyond the shards; the others hold everything all the time."""
    found = [sample.resident for sample in seen.samples]
    if plan.stage < 3:
        assert set(found) == {plan.padded * plan.itemsize}, f"residency: {sorted(set(found))}"
        return
    sizes = [sum(u.share * plan.ranks * plan.itemsize for u in plan.units_of(i)) for i in range(len(plan.regions))]
    most = max(one + other for one, other in zip(sizes, sizes[1:], strict=False))
    assert max(found) == most, f"residency: {max(found)} bytes at the peak, not two units: {most}"
    assert found[-1] == 0, f"residency: {found[-1]} bytes after the backward"


def check_gathers_overlap(seen: Observation, plan: Plan) -> None:
    """Stages 1 and 2 begin to gather everything before the first layer runs, and wait for it region by region.
    Stage 3 begins to gather what comes next right before it computes, and nothing earlier than that."""
    calls, gathers = seen.of("all_gather"), plan.gathers()
    assert len(calls) == len(gathers), "order of gathers: there are others than expected"
    for call, (direction, region, _) in zip(calls, gathers, strict=True):
        issue, wait = call.issue.at, call.wait_start and call.wait_start.at
        name = f"order of gathers: that for the {direction} of region {region}"
        assert wait == seen.position(f"{direction} {region}"), f"{name} is waited for elsewhere than right before it"
        if plan.stage < 3 or (direction, region) == ("forward", 0):
            assert issue == seen.position("forward 0"), f"{name} does not begin with the step"
            continue
        step = -1 if direction == "forward" else 1
        before = seen.position(f"{direction} {region + step}")
        assert issue <= before, f"{name} begins after the region before it: no prefetch"
        if region + 2 * step in range(len(plan.regions)):
            earlier = seen.position(f"{direction} {region + 2 * step}")
            assert issue > earlier, f"{name} begins two regions ahead"


def check_one_in_flight(seen: Observation, plan: Plan) -> None:
    """No reduce-scatter still needs its memory when a gather is about to need some."""
    when = {id(sample): index for index, sample in enumerate(seen.samples)}
    for gather in seen.of("all_gather"):
        for reducing in seen.of("reduce_scatter"):
            if when[id(reducing.issue)] < (now := when[id(gather.issue)]):
                assert when[id(reducing.wait_end)] <= now, "in flight: a reduce-scatter, when a gather begins"


def check_reductions_overlap(seen: Observation, plan: Plan) -> None:
    """Reduce-scatters begin during the backward, each as soon as its gradients are there (stage 3: as its region is
    done), those of a step in one order."""
    calls, done, total = seen.of("reduce_scatter" if plan.ranks > 1 else "all_reduce"), 0, len(plan.sizes)
    assert seen.events.count("gradient") == total, "order of reductions: a parameter has not one gradient"
    for index, (unit, call) in enumerate(zip(plan.units, calls, strict=False)):
        issue, done, name = call.issue.at, done + len(unit.names), f"order of reductions: that of unit {index}"
        so_far = seen.events[:issue].count("gradient")
        if plan.stage < 3:  # the hook that launches runs before the one that counts its gradient
            # The backward meets the parameters of one layer in an order of its own; a layer has nine
            assert done - 1 <= so_far <= done - 1 + 8, f"{name} begins after {so_far} of {total} gradients"
            if plan.stage == 1 and plan.replicas == 1 and plan.ranks > 1:  # it waits only for gloo's buffers
                waited = seen.events[: call.wait_start.at].count("gradient")
                following = calls[index + REDUCING : index + REDUCING + 1]
                due = seen.events[: following[0].issue.at].count("gradient") if following else total
                assert waited == due, f"{name} is waited for after {waited} of {total} gradients, not after {due}"
        else:
            region = len(plan.regions) - 1 - index
            assert issue > seen.position(f"backward {region}"), f"{name} begins before its backward"
            late = len(seen.events) if region == 0 else seen.position(f"backward {region - 1}")
            assert issue <= late, f"{name} begins after {so_far} of {total} gradients"


def check_gradient_memory(seen: Observation, plan: Plan) -> None:
    """Stages 2 and 3 hold the whole gradients of three units at most: one is under way, one fills, and the next may
    begin early where the backward meets parameters in another order. Each is gone when the next but one is launched.
    """
    sizes, peak = [unit.share * plan.ranks * plan.wide for unit in plan.units], 0
    for sample in seen.samples:
        peak = max(peak, sum(sample.gradients))
        assert all(size in (0, whole) for size, whole in zip(sample.gradients, sizes)), "gradient memory: other sizes"
    if plan.stage < 2:
        assert peak == sum(sizes), f"gradient memory: {peak} bytes"
        return
    assert sum(seen.samples[-1].gradients) == 0, "gradient memory: some is left after the backward"
    if plan.reductions < plan.micro_batches:
        assert peak > sum(sizes) / 2, f"gradient memory: {peak} bytes, though all micro-batches are summed first"
        return
    count = len(sizes) - plan.config.model_config.tie_embeddings  # a tied embedding, the last, fills all along
    for sample in seen.samples:
        alive = [index for index in range(count) if sample.gradients[index]]
        assert not alive or alive[-1] - alive[0] < 3, f"gradient memory: units {alive} at once"
    if plan.ranks > 1:
        for index, call in enumerate(seen.of("reduce_scatter")):
            before = call.issue.gradients[: max(0, index % len(sizes) - 1)]
            assert not any(before), f"gradient memory: {before} are there while unit {index % len(sizes)} is launched"


def check_phases(seen: Observation, plan: Plan) -> None:
    """Gathers begin in the pass that waits for them, and reductions in the last backward at the latest; where all
    micro-batches are summed first, none begins before it."""
    phases = {op: [call.phase for call in seen.of(op)] for op in plan.calls()}
    gathers = [direction for direction, *_ in plan.gathers()] * (plan.micro_batches if plan.stage == 3 else 1)
    assert phases["all_gather"] == gathers, f"phases of gathers: {phases['all_gather']}"
    scatters = ["backward"] * len(phases["reduce_scatter"])
    if plan.stage == 3 and plan.config.zero_reduce == "step" and scatters:
        scatters[-1] = "optimizer"  # that of the first region, below which no backward begins
    assert phases["reduce_scatter"] == scatters, f"phases of reduce-scatters: {phases['reduce_scatter']}"
    last = len(seen.events) - 1 - seen.events[::-1].index("forward 0")
    early = [call for call in seen.of("reduce_scatter") if call.issue.at <= last and plan.reductions == 1]
    assert not early, f"phases of reduce-scatters: {early} begin before the last micro-batch"
    *sums, _, _ = phases["all_reduce"]  # over the replicas: the norm and the loss are the last two
    late = 0 if plan.ranks == 1 else 2  # what waits for the last reduce-scatters
    assert set(sums[: len(sums) - late]) <= {"backward"}, f"phases of sums over replicas: {sums}"


# ---- checks of all ranks together ------------------------------------------------------------------------------------


def check_same_order(ranks: list[Observation]) -> None:
    """Every rank issues the same collectives in the same order: NCCL would hang otherwise."""
    first, *others = ([(c.op, c.group, c.elements, c.dtype, c.bytes) for c in seen.calls] for seen in ranks)
    for order in others:
        assert order == first, f"same order: {order} where rank 0 has {first}"


def check_optimizer_in_sum(ranks: list[Observation], plan: Plan) -> None:
    """All ranks together hold state for each parameter once a replica, and no padding."""
    held = sum(seen.held["after the step"]["optimizer"] for seen in ranks)
    counters = held - plan.replicas * plan.parameters * plan.states
    least, most = plan.replicas * len(plan.sizes), plan.replicas * (len(plan.sizes) + len(plan.units) * plan.ranks)
    assert 4 * least <= counters <= 4 * most, f"optimizer in sum: {held} bytes"
    # A run is refused if its machine has less than this lower bound, which leaves out only padding and counters
    before = [seen.held["before the update"] for seen in ranks]
    held += sum(each["parameters"] + each["gradients"] for each in before)
    ratio = held / bytes_needed(plan.config)
    assert 1 <= ratio < 1.02, f"what a run is sure to need: {held} bytes, {ratio} of what was said"


def check(ranks: list[Observation], plan: Plan) -> None:
    """All of them, but the wire: its 2% want a large model."""
    check_same_order(ranks)
    for seen in ranks:
        check_calls(seen, plan)
        check_bytes_held(seen, plan)
        check_residency(seen, plan)
        check_gradient_memory(seen, plan)
        check_phases(seen, plan)
        check_one_in_flight(seen, plan)
        if plan.micro_batches == 1:  # or every event has happened several times
            check_gathers_overlap(seen, plan)
            check_reductions_overlap(seen, plan)
    check_optimizer_in_sum(ranks, plan)
