"""The suite notices every known-wrong variant that trains right, but sends, holds, computes or waits for more."""

from collections.abc import Callable
from functools import cache, partial

import pytest

from tests.harness.ranks import run_ranks
from tests.mechanisms.step02 import test_accounting as step02
from tests.mechanisms.step03 import checks
from tests.mechanisms.step03 import test_model_state as state
from tests.mechanisms.step03.observe import observe as observe_zero
from tests.mechanisms.step03.test_accounting import LARGE, SMALL, plan_of
from tests.mechanisms.step04 import test_accounting as step04
from tests.mechanisms.step04 import test_activations
from tests.mechanisms.step05 import test_accounting as step05
from tests.mechanisms.step05.observe import observe as observe_pipeline
from tests.mechanisms.step06 import test_accounting as step06
from tests.mechanisms.step07 import test_accounting as step07
from tests.mechanisms.step08.test_fused import TINY, assert_recomputes, train_in_pieces
from tests.mutants.patches import STEPS, assert_applies, patched
from tests.parity.runs import ADAMW, assert_parity, reference

Check = tuple[Callable, Callable]  # what each rank observes, and the check of what all have observed
partial_of = cache(partial)  # one and the same object for the same observation, which is made once


def of_each_rank(check: Callable, *arguments) -> Callable:
    """A check of all ranks."""

    def of_all(ranks: list) -> None:
        for seen in ranks:
            check(seen, *arguments)

    return of_all


def of_zero(check: str, flags: str) -> Check:
    return partial_of(observe_zero, flags), of_each_rank(getattr(checks, f"check_{check}"), plan_of(flags, 2))


def of_pipeline(check: str, flags: str) -> Check:
    return partial_of(observe_pipeline, flags), partial(getattr(step05, f"check_{check}"), flags=flags)


BUCKETS = "--micro-batch 1 --dp-mode bucket"
ONCE, SEVERAL = f"--micro-batch 6 {SMALL}", f"--micro-batch 1 {SMALL}"  # micro-batches on each of two ranks
TRAIN_4 = partial(step04.ranks_train, step04.cases(2)[2:3]), step04.check_train
ORDER_4, ORDER_7 = (step04.ranks_order, step04.check_order), (step07.ranks_order, step07.check_order)
LOSS = test_activations.ranks_loss_memory, test_activations.check_loss_memory
ON_FOUR = ["--cp 4 --cp-split contiguous --kv-heads 4 --micro-batch 2"]
TRAIN_6 = partial(step06.ranks_train, ON_FOUR), partial(step06.check_train, flags=ON_FOUR)
WATCH = partial(step02.watch_train, BUCKETS), of_each_rank(step02.check_train, BUCKETS, 2)
INITIAL = state.initial_peak, of_each_rank(lambda seen: state.check_initial_peak(*seen))
GRADIENTS = partial(state.peak_of_gradients, "--zero 2"), of_each_rank(lambda s: state.check_peak_of_gradients(*s))
DP_2, PP_4 = "--pp 2 --dp 2 --schedule", "--pp 4 --schedule"
NOTICED = {  # mutant: ranks, observation and check, what that says
    "nothing overlaps": (2, WATCH, "bucket 1 waits for the one before"),
    "last backward missed": (2, WATCH, "bucket 0 is launched in the phase optimizer"),
    "all-reduce poses as reduce-scatter": (2, of_zero("calls", f"--zero 2 {ONCE}"), "calls: 0 x reduce_scatter"),
    "gloo's own reduce-scatter": (2, of_zero("wire", f"{LARGE} --zero 2 --micro-batch 6"), "wire: .* of the formula"),
    "unsharded optimizer": (2, of_zero("bytes_held", f"--zero 1 {ONCE}"), "bytes held: .* of optimizer state"),
    "parameters never freed": (2, of_zero("residency", f"--zero 3 {ONCE}"), "residency: .* at the peak"),
    "prefetch of two": (2, of_zero("residency", f"--zero 3 {ONCE}"), "residency: .* at the peak"),
    "no prefetch": (2, of_zero("gathers_overlap", f"--zero 3 {ONCE}"), "order of gathers: .* no prefetch"),
    "no prefetch in the backward": (2, of_zero("gathers_overlap", f"--zero 3 {ONCE}"), "no prefetch"),
    "last unit freed and gathered again": (2, of_zero("calls", f"--zero 3 {ONCE}"), "9 x all_gather instead of 8"),
    "waits for all gathers": (2, of_zero("gathers_overlap", f"--zero 1 {ONCE}"), "order of gathers: .* elsewhere"),
    "reduced after the backward": (2, of_zero("reductions_overlap", f"--zero 2 {ONCE}"), "order of reductions: "),
    "stage 1 waits for the previous bucket": (2, of_zero("reductions_overlap", f"--zero 1 {ONCE}"), "is waited for"),
    "all buckets in flight": (2, of_zero("reductions_overlap", f"--zero 1 {ONCE}"), "is waited for"),
    "last backward of ZeRO missed": (2, of_zero("phases", f"--zero 1 {SEVERAL}"), "phases of reduce-scatters: "),
    "gathers beside a reduction": (2, of_zero("one_in_flight", f"--zero 3 {ONCE}"), "in flight: a reduce-scatter"),
    "gradients kept": (2, of_zero("gradient_memory", f"--zero 2 {ONCE}"), "gradient memory: "),
    "each matrix communicates for itself": (2, TRAIN_4, None),
    "gathered inputs kept": (2, (test_activations.ranks_saved, test_activations.check_saved), None),
    "input gradient waited for": (2, ORDER_4, None),
    "rings wait before they multiply": (2, ORDER_4, None),
    "full logits on every rank": (2, LOSS, None),
    "logits kept by the loss": (2, LOSS, None),
    "gradient of the logits copied": (2, LOSS, None),
    "sent outputs kept": (4, of_pipeline("memory", f"{PP_4} 1f1b"), "sent outputs kept"),
    "graph kept until W": (4, of_pipeline("memory", f"{PP_4} zb-h1"), "graphs alive"),
    "operands of weight gradients kept": (4, of_pipeline("memory", f"{PP_4} zb-h1"), "operands of weight gradients"),
    "reduced at the end": (4, of_pipeline("reductions", f"{DP_2} zbv --zero 1"), "reduced in the optimizer"),
    "gathered for each micro-batch": (4, of_pipeline("gathers", f"{DP_2} 1f1b --zero 3"), "gathered"),
    "weights kept after the step": (4, of_pipeline("gathers", f"{DP_2} 1f1b --zero 3"), "bytes of weights"),
    "data read by every stage": (4, of_pipeline("order", f"{PP_4} 1f1b"), "micro-batches read"),
    "received when needed": (4, of_pipeline("program", f"{PP_4} 1f1b"), "order of messages"),
    "sends waited for": (4, of_pipeline("program", f"{PP_4} 1f1b"), "waits for its sends"),
    "wait counted as work": (4, of_pipeline("messages", f"{PP_4} 1f1b"), "counts the wait as part of the action"),
    "one communicator for both directions": (4, of_pipeline("communicators", f"{PP_4} zb-h2"), "one direction waits"),
    "K/V repeated before they are sent": (4, TRAIN_6, None),
    "ring waits before it computes": (4, (step06.ranks_order, step06.check_order), None),
    "keys travel all the way": (4, TRAIN_6, None),
    "all keys of a ring kept": (4, (step06.ranks_peak, step06.check_peak), None),
    "causal blocks in squares": (4, TRAIN_6, None),
    "dispatch waits before the shared experts": (2, ORDER_7, None),
    "shared experts after the dispatch": (2, ORDER_7, None),
    "gradients arrive before the shared experts' backward": (2, ORDER_7, None),
    "counts read for drops that cannot be": (2, ORDER_7, None),
    "whole model at first": (4, INITIAL, "initial peak: "),
    "buckets kept elsewhere": (2, GRADIENTS, "peak of gradients: "),
}


def observe_all(observations: dict[str, Callable]) -> dict[tuple[str, str | None], object]:
    """On a rank: what it observes of each mutant (name, name) and without it (name, None)."""
    found, sound = {}, {}
    for name, observe in observations.items():
        if observe not in sound:
            sound[observe] = observe()
        with patched(name):
            found |= {(name, None): sound[observe], (name, name): observe()}
    return found


@cache
def observed(ranks: int, step: int) -> list[dict]:
    mine = {name: check[0] for name, (world, check, _) in NOTICED.items() if world == ranks and name in STEPS[step]}
    return run_ranks(ranks, observe_all, mine, timeout=300)


@pytest.mark.parametrize("name", NOTICED)
def test_a_higher_price_is_noticed(name):
    assert_applies(name)
    ranks, (_, check), message = NOTICED[name]
    seen = observed(ranks, next(step for step, mutants in STEPS.items() if name in mutants))
    check([rank[name, None] for rank in seen])
    with pytest.raises(AssertionError, match=message):
        check([rank[name, name] for rank in seen])


LAUNCHES = {"one launch per gradient": partial(step02.launch_in_data_parallel, "bucket")}
LAUNCHES |= {"one launch per gradient of ZeRO": state.launch_in_zero}
NOTICED_ALONE = *LAUNCHES, "recompute before the kernels"


@pytest.mark.parametrize("name", LAUNCHES)
def test_complete_buckets_do_not_wait(name):
    assert_applies(name)
    LAUNCHES[name]()
    with patched(name), pytest.raises(AssertionError, match="launches: complete"):
        LAUNCHES[name]()


def test_a_lost_recompute_is_noticed():
    """No curve shows it: it trains the same."""
    assert_applies("recompute before the kernels")
    flags = f"{TINY} {ADAMW} --layers 2 --recompute full"
    result, calls = train_in_pieces(flags, "recompute before the kernels")
    assert_parity(result, reference(flags), "recompute before the kernels")
    with pytest.raises(AssertionError, match="computed twice"):
        assert_recomputes(calls)
