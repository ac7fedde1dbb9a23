"""The batch recipe and the predictions of step 2, against the playbook's examples and numbers worked out by hand."""

import pytest
import torch

from common.link import Link
from common.presets import PRESETS
from step01_single_gpu.memory_model.peak import predict_peak
from step02_data_parallel import batch_recipe
from step02_data_parallel.batch_recipe import ALL_REDUCE_GB_PER_S, fill, largest_micro_batch, main, tokens_to_hide
from step02_data_parallel.experiments import predictions


def test_the_playbooks_example():
    """4M tokens of 4k are 1,024 samples; 128 GPUs with micro-batch 2 take 4 accumulation steps, 512 take 1."""
    for tokens in (4e6, 4 * 2**20):
        recipe = fill(tokens, 4096, 128, 2)
        assert (recipe.samples, recipe.accumulation) == (1024, 4)
        recipe = fill(tokens, 4096, 512, 2)
        assert (recipe.samples, recipe.accumulation) == (1024, 1)


def test_samples_are_always_filled():
    for gpus in (1, 3, 64, 1000):
        for micro_batch in (1, 2, 5):
            recipe = fill(4e6, 4096, gpus, micro_batch)
            assert recipe.samples == gpus * micro_batch * recipe.accumulation and recipe.accumulation >= 1
            assert abs(recipe.samples - recipe.wanted) <= max(
                gpus * micro_batch / 2, gpus * micro_batch - recipe.wanted
            )


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_largest_micro_batch_is_the_last_that_fits(recompute):
    model, seq, limit = PRESETS["llama3-1b"], 4096, 80e9
    largest = largest_micro_batch(model, seq, limit, torch.bfloat16, recompute)
    assert largest > 1

    def peak(batch: int) -> int:
        return predict_peak(model, batch, seq, torch.bfloat16, recompute=recompute, accumulation=2).peak

    assert peak(largest) <= limit < peak(largest + 1)


def test_nothing_fits_when_the_states_do_not():
    assert largest_micro_batch(PRESETS["llama3-8b"], 4096, 80e9, torch.bfloat16) == 0


def test_tokens_that_hide_the_all_reduce():
    """The corrected condition at the playbook's bandwidths, 989 TFLOP/s, 2 bytes, worked by hand."""
    worked = {8: 2.0e3, 16: 2.6e3, 32: 6.0e3, 64: 9.8e3, 128: 11.6e3, 256: 15.2e3, 512: 30e3}
    for gpus, tokens in worked.items():
        assert tokens_to_hide(gpus, ALL_REDUCE_GB_PER_S[gpus] * 1e9, 989e12, 2) == pytest.approx(tokens, rel=0.02)
    assert tokens_to_hide(1, 1e9, 989e12, 2) == 0, "one rank sends nothing"


def test_condition_is_the_ratio_of_the_two_times():
    parameters, tokens, dp, peak, bandwidth, width = 7e9, 5000, 16, 1e14, 5e10, 4
    all_reduce = predictions.all_reduce_bytes(width * parameters, dp) / bandwidth
    backward = 4 * tokens * parameters / peak
    assert tokens_to_hide(dp, bandwidth, peak, width) / tokens == pytest.approx(all_reduce / backward)
    printed = batch_recipe.printed_ratio(parameters, tokens, dp, bandwidth, peak)
    assert printed == pytest.approx(all_reduce / backward * parameters / width), "what the printed form has too much"


def test_bandwidth_between_the_measured_points():
    assert batch_recipe.all_reduce_bandwidth(64) == 99.6e9
    assert batch_recipe.all_reduce_bandwidth(4) == 436e9 and batch_recipe.all_reduce_bandwidth(4096) == 32.9e9
    between = batch_recipe.all_reduce_bandwidth(90)
    assert 84.7e9 < between < 99.6e9


def test_exposed_share():
    assert batch_recipe.exposed_share(0.5, 1) == 0
    assert batch_recipe.exposed_share(2.5, 1) == pytest.approx(0.5), "1.5 backwards of computing, 1.5 of waiting"
    assert batch_recipe.exposed_share(2.5, 4) == pytest.approx(1.5 / 7.5)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_command_with_a_given_micro_batch(capsys):
    assert main("--model llama3-8b --tokens-per-batch 4e6 --seq-len 4096 --gpus 128 --micro-batch 2".split()) == 0
    printed = capsys.readouterr().out
    assert "1,024 sequences x 4,096 = 4,194,304 tokens" in printed
    assert "1,024 / (2 x 128) = 4 a rank and step" in printed
    assert "not even 1 fits 80 GB" in printed and "GPU-rich" not in printed
    assert "512 GPUs at  32.9 GB/s   30,002   60,004" in printed


def test_command_stops_where_nothing_fits(capsys):
    assert main("--model llama3-8b --gpus 128".split()) == 1
    printed = capsys.readouterr().out
    assert "step 3 (ZeRO) does" in printed and "global batch" not in printed


def test_command_searches_the_micro_batch(capsys):
    assert main("--model llama3-1b --gpus 64 --recompute selective".split()) == 0
    printed = capsys.readouterr().out
    assert "micro-batch    at most" in printed and "GPU-rich" not in printed


def test_gpu_rich(capsys):
    assert main("--model llama3-1b --gpus 1024 --micro-batch 2 --tokens-per-batch 4.2e6".split()) == 0
    printed = capsys.readouterr().out
    assert "GPU-rich       only 0.50 micro-batches a GPU" in printed
    assert "a micro-batch of 1:" in printed and "513 data-parallel ranks" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpus 0", "--gpus 0 must be positive"),
        ("--tokens-per-batch nan", "--tokens-per-batch nan must be positive"),
        ("--model mixtral-8x7b", "has experts"),
        ("--model nothing", "--model nothing is no preset"),
    ],
)
def test_bad_input_is_one_line(flags, message, capsys):
    assert main(flags.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and len(error.splitlines()) == 1


# ---- predictions -----------------------------------------------------------------------------------------------------

LINK = Link(alpha=0.001, bandwidth=1e6)


def test_all_reduce_times():
    assert predictions.all_reduce_bytes(1000, 4) == 1500
    assert predictions.all_reduce_seconds(1000, 4, LINK) == pytest.approx(6 * 0.001 + 0.0015)


def test_naive_exposes_everything():
    made = predictions.overlap([1000, 1000], [1, 1], backward=1.0, ranks=2, link=LINK, mode="naive")
    assert made.communication == pytest.approx(2 * 0.003) and made.exposed == pytest.approx(made.communication)
    assert made.overlap_share == pytest.approx(0, abs=1e-9)


def test_hooks_hide_what_fits_into_the_backward():
    made = predictions.overlap([1000, 1000], [1, 1], backward=1.0, ranks=2, link=LINK, mode="overlap")
    assert made.communication == pytest.approx(0.006) and made.exposed == pytest.approx(0.003), "the last one"
    slow = predictions.overlap([1000] * 4, [1] * 4, backward=0.004, ranks=2, link=LINK, mode="overlap")
    assert slow.exposed == pytest.approx(0.001 + 4 * 0.003 - 0.004), "the link is never idle after the first"


def test_buckets_save_latency():
    sizes, costs = [1000] * 10, [1.0] * 10
    hooks = predictions.overlap(sizes, costs, 0.01, 2, LINK, "overlap")
    buckets = predictions.overlap(sizes, costs, 0.01, 2, LINK, "bucket", limit=5000)
    assert hooks.communication - buckets.communication == pytest.approx(8 * 0.002), "eight messages fewer"
    assert buckets.exposed == pytest.approx(0.005 + 2 * 0.007 - 0.01) and hooks.exposed == pytest.approx(
        0.001 + 0.03 - 0.01
    )


def test_strong_scaling_never_exceeds_one_gpus_speed():
    shape = {"samples": 256, "micro_batch": 1, "seq_len": 4096, "alone": 1000.0, "peak_flops": 4e14}
    speeds = [predictions.tokens_per_second_per_gpu(dp, **shape, gradient_bytes=4) for dp in (8, 64, 256)]
    assert speeds[0] == 1000.0 and speeds[2] < speeds[1] <= 1000.0
