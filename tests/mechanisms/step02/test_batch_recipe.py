"""The batch recipe and the predictions of step 2, against the playbook's examples and numbers worked out by hand."""

import itertools

import pytest
import torch

from common.costs import alpha_beta
from common.costs.networks import BUS_GB_PER_S, bus_bandwidth
from common.link import Link
from common.presets import PRESETS
from step01_single_gpu.memory_model.peak import predict_peak
from step02_data_parallel import cost
from step02_data_parallel.batch_recipe import fill, largest_micro_batch, main
from step02_data_parallel.experiments import cluster


def test_the_playbooks_example():
    """4M tokens of 4k are 1,024 samples; 128 GPUs with micro-batch 2 take 4 accumulation steps, 512 take 1."""
    for tokens, (gpus, steps) in itertools.product((4e6, 4 * 2**20), ((128, 4), (512, 1))):
        recipe = fill(tokens, 4096, gpus, 2)
        assert (recipe.samples, recipe.accumulation) == (1024, steps)


def test_samples_are_always_filled():
    for gpus, size in itertools.product((1, 3, 64, 1000), (1, 2, 5)):
        recipe = fill(4e6, 4096, gpus, size)
        assert recipe.samples == gpus * size * recipe.accumulation and recipe.accumulation >= 1
        assert abs(recipe.samples - recipe.wanted) <= max(gpus * size / 2, gpus * size - recipe.wanted)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_largest_micro_batch_is_the_last_that_fits(recompute):
    """A limit is exactly the peak of so many sequences, or one byte less."""
    model, shape = PRESETS["debug"], (4096, torch.bfloat16)
    for batch in range(1, 10):
        limit = predict_peak(model, batch, *shape, recompute=recompute, accumulation=2).peak
        found = [largest_micro_batch(model, shape[0], each, shape[1], recompute) for each in (limit, limit - 1)]
        assert found == [batch, batch - 1]
    assert largest_micro_batch(PRESETS["llama3-8b"], 4096, 80e9, torch.bfloat16) == 0, "the states alone are too large"


def test_tokens_that_hide_the_all_reduce():
    """The corrected condition at the playbook's bandwidths, 989 TFLOP/s, 2 bytes, worked by hand."""
    worked = {8: 2.0e3, 16: 2.6e3, 32: 6.0e3, 64: 9.8e3, 128: 11.6e3, 256: 15.2e3, 512: 30e3}
    for gpus, tokens in worked.items():
        bandwidth = 1e9 * BUS_GB_PER_S["all_reduce"][gpus]
        assert cost.tokens_to_hide(gpus, bandwidth, 989e12, 2) == pytest.approx(tokens, rel=0.02)
    assert cost.tokens_to_hide(1, 1e9, 989e12, 2) == 0, "one rank sends nothing"


def test_condition_is_the_ratio_of_the_two_times():
    parameters, tokens, dp, peak, bandwidth, width = 7e9, 5000, 16, 1e14, 5e10, 4
    ratio = alpha_beta.all_reduce_bytes(width * parameters, dp) / bandwidth / (4 * tokens * parameters / peak)
    assert cost.tokens_to_hide(dp, bandwidth, peak, width) / tokens == pytest.approx(ratio)
    printed = cost.printed_ratio(parameters, tokens, dp, bandwidth, peak)
    assert printed == pytest.approx(ratio * parameters / width), "what the printed form has too much"


def test_bandwidth_between_the_measured_points():
    expected = {64: 99.6e9, 4: 436e9, 4096: 32.9e9, 90: (99.6 * 84.7) ** 0.5 * 1e9}  # 90 is near 64 x 2 ** 0.5
    found = {gpus: bus_bandwidth("all_reduce", gpus) for gpus in expected}
    assert found == pytest.approx(expected, rel=0.002) and found[64] == pytest.approx(99.6e9, rel=1e-12)


def test_exposed_share():
    cases = {(0.5, 1): 0, (2.5, 1): 0.5, (2.5, 4): 1.5 / 7.5}  # 1.5 backwards of computing, 1.5 of waiting
    assert {case: cost.exposed_share(*case) for case in cases} == pytest.approx(cases)


EXAMPLE = "--model llama3-8b --tokens-per-batch 4e6 --seq-len 4096 --gpus 128 --micro-batch 2"
TOO_MANY = "--model llama3-1b --gpus 1024 --micro-batch 2 --tokens-per-batch 4.2e6"
COMMANDS = [  # flags, status, parts of what is printed
    (EXAMPLE, 0, ["= 4,194,304 tokens", "1,024 / (2 x 128) = 4 per rank", "not even 1 fits 80 GiB", "30,002   60,004"]),
    ("--model llama3-8b --gpus 128", 1, ["makes no state smaller"]),
    ("--model llama3-1b --gpus 64 --recompute selective", 0, ["micro-batch    at most"]),
    (TOO_MANY, 0, ["only 0.50 micro-batches", "a micro-batch of 1:", "513 data-parallel ranks"]),
    ("--gpus 0", 2, ["error: --gpus 0 must be positive"]),
    ("--tokens-per-batch nan", 2, ["error: --tokens-per-batch nan must be positive"]),
    ("--model mixtral-8x7b", 2, ["error: --model mixtral-8x7b has experts"]),
    ("--model nothing", 2, ["error: --model nothing is no preset"]),
]


@pytest.mark.parametrize("flags, status, said", COMMANDS)
def test_command(flags, status, said, capsys):
    assert main(flags.split()) == status
    printed = capsys.readouterr()
    text = printed.err if status == 2 else printed.out
    assert all(each in text for each in said), text
    assert status != 2 or len(text.splitlines()) == 1


# ---- predictions -----------------------------------------------------------------------------------------------------

LINK = Link(alpha=0.001, bandwidth=1e6)


@pytest.mark.parametrize(
    "mode, buckets, messages, backward, seconds, exposed",
    [
        ("naive", 2, 2, 1.0, 0.003, 2 * 0.003),  # everything
        ("overlap", 2, 2, 1.0, 0.003, 0.003),  # the last one
        ("overlap", 4, 4, 0.004, 0.003, 0.001 + 4 * 0.003 - 0.004),  # the link is never idle after the first
        ("overlap", 10, 10, 0.01, 0.003, 0.001 + 10 * 0.003 - 0.01),
        ("bucket", 10, 2, 0.01, 0.007, 0.005 + 2 * 0.007 - 0.01),  # eight latencies fewer
    ],
)
def test_overlap(mode, buckets, messages, backward, seconds, exposed):
    player, sizes = alpha_beta.Player(2, LINK), [1000] * buckets
    filled = alpha_beta.fill_buckets(sizes, 5000 if mode == "bucket" else 0)
    cost.play_step(player, filled, sizes, [1] * buckets, (0.5, backward), naive=mode == "naive")
    assert (player.communication, player.blocked) == pytest.approx((messages * seconds, exposed))
    assert player.now == pytest.approx(0.5 + backward + exposed)


def test_strong_scaling_never_exceeds_one_gpus_speed():
    shape = {"samples": 256, "micro_batch": 1, "seq_len": 4096, "alone": 1000.0, "reached_flops": 4e14}
    speeds = [cost.tokens_per_second_per_gpu(dp, **shape, gradient_bytes=4) for dp in (8, 64, 256)]
    assert speeds[0] == 1000.0 and speeds[2] < speeds[1] <= 1000.0


def test_published_drops_of_strong_scaling():
    assert [100 * drop for drop in cluster.drops()] == pytest.approx([-6.3, -6.0, -12.0, -15.0, -40.6], abs=0.05)
