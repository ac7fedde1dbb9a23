"""The batch recipe of step 2, against the playbook's examples and numbers worked out by hand."""

import itertools

import pytest
import torch

from common.presets import PRESETS
from step01_single_gpu.memory_model.peak import predict_peak
from step02_data_parallel.batch_recipe import fill, largest_micro_batch, main


def test_samples_are_filled():
    """The playbook's example: 4M tokens of 4k are 1,024 samples, 4 accumulation steps on 128 GPUs, 1 on 512."""
    for tokens, (gpus, steps) in itertools.product((4e6, 4 * 2**20), ((128, 4), (512, 1))):
        recipe = fill(tokens, 4096, gpus, 2)
        assert (recipe.samples, recipe.accumulation) == (1024, steps)
    assert fill(4e6, 4096, 1000, 5).accumulation == 1, "more than all"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_largest_micro_batch_is_the_last_that_fits(recompute):
    """A limit is exactly the peak of so many sequences, or one byte less."""
    model, shape = PRESETS["debug"], (4096, torch.bfloat16)
    for batch in range(1, 10):
        limit = predict_peak(model, batch, *shape, recompute=recompute, accumulation=2).peak
        found = [largest_micro_batch(model, shape[0], each, shape[1], recompute) for each in (limit, limit - 1)]
        assert found == [batch, batch - 1]


EXAMPLE = "--model llama3-8b --tokens-per-batch 4e6 --seq-len 4096 --gpus 128 --micro-batch 2"
COMMANDS = [  # flags, status, a part of what is printed
    (EXAMPLE, 0, "1,024 / (2 x 128) = 4 per rank"),
    ("--model llama3-8b --gpus 128", 1, "makes no state smaller"),
    ("--model llama3-1b --gpus 8 --memory-gib 30", 1, ": --recompute full would do"),
    ("--model llama3-1b --gpus 8 --memory-gib 30 --recompute full", 0, "at most 1 fits 30 GiB"),
    ("--model llama3-1b --gpus 8 --memory-gib 24", 1, "is too large, even with --recompute full"),
    ("--model llama3-1b --gpus 1024 --micro-batch 2 --tokens-per-batch 4.2e6", 0, "only 0.50 micro-batches"),
    ("--tokens-per-batch nan", 2, "error: --tokens-per-batch nan"),
    ("--model mixtral-8x7b", 2, "error: --model mixtral-8x7b"),
]


@pytest.mark.parametrize("flags, status, said", COMMANDS)
def test_command(flags, status, said, capsys):
    assert main(flags.split()) == status
    printed = capsys.readouterr()
    assert said in (printed.err if status == 2 else printed.out)
    assert status != 2 or len(printed.err.splitlines()) == 1
