"""The formula of memory beside the dry run, by kind at the peak."""

import os

import pytest

from common.costs.vocabulary import KINDS
from common.launching.run_mesh import degrees_of
from step08_5d.cost import Layout
from step08_5d.planning.dry_run.play import configuration, dry_run, first_ranks
from step08_5d.planning.memory.peak import peak

WIDE = "--layers 6 --hidden 1024 --heads 16 --kv-heads 4 --ffn 3584 --vocab 32000 --seq-len 2048"
NARROW = "--layers 8 --hidden 768 --heads 12 --kv-heads 12 --ffn 2048 --vocab 16000 --seq-len 1024"
LONG = "--layers 4 --hidden 1024 --heads 16 --kv-heads 2 --ffn 4096 --vocab 8000 --seq-len 8192"
EXPERTS = "--layers 4 --hidden 1024 --heads 16 --kv-heads 4 --ffn 2816 --vocab 32000 --seq-len 2048 --experts 8"
EXPERTS += " --top-k 2 --expert-ffn 1408"
FINE = "--layers 5 --hidden 1024 --heads 16 --kv-heads 4 --ffn 4096 --vocab 32000 --seq-len 2048 --experts 32 --top-k 4"
FINE += " --expert-ffn 512 --shared-experts 1 --dense-layers 1"
# Attention is the fullest: what the experts' backward forgets to release would be there
TINY = "--layers 3 --hidden 512 --heads 8 --kv-heads 8 --ffn 512 --vocab 512 --seq-len 4096 --experts 4 --top-k 1"
TINY += " --expert-ffn 32 --shared-experts 1 --micro-batch 1"
# Attention is the fullest here, too
LATENT = "--latent 64,64,64,32,64 --layers 3 --hidden 128 --heads 16 --kv-heads 16 --ffn 128 --vocab 256 --seq-len 2048"
SECOND = "--layers 4 --hidden 512 --heads 4 --kv-heads 4 --ffn 1024 --vocab 4000 --seq-len 1024 --micro-batch 1 --mtp 1"
DEEPSEEK = (
    "--model deepseek-v3 --layers 5 --dense-layers 1 --experts 8 --top-k 2 --expert-groups 1 --node-limit 1 --mtp 1"
)
DEEPSEEK += " --vocab 16000 --hidden 1024 --heads 16 --kv-heads 16 --ffn 2048 --expert-ffn 512 --seq-len 1024"
BF16 = "--dtype bfloat16"
# World, shape, layout; every 25th in `make test`
CASES = [
    f"1 {WIDE} {BF16} --global-batch 4 --micro-batch 2",
    f"1 {WIDE} --global-batch 4 --micro-batch 2",
    f"1 {WIDE} {BF16} --global-batch 2 --micro-batch 2",
    f"1 {WIDE} {BF16} --global-batch 4 --micro-batch 1 --recompute full",
    f"1 {NARROW} {BF16} --global-batch 8 --micro-batch 8 --recompute selective",
    f"1 {NARROW} {BF16} --global-batch 2 --micro-batch 1 --tie-embeddings",
    f"1 {LONG} {BF16} --global-batch 2 --micro-batch 1",
    f"4 {WIDE} {BF16} --dp 4 --zero 1 --global-batch 16 --micro-batch 2",
    f"4 {WIDE} {BF16} --dp 4 --zero 2 --global-batch 16 --micro-batch 2",
    f"4 {WIDE} {BF16} --dp 4 --zero 2 --global-batch 4 --micro-batch 1",
    f"4 {WIDE} {BF16} --dp 4 --zero 3 --global-batch 16 --micro-batch 2",
    f"4 {WIDE} {BF16} --dp 4 --zero 3 --global-batch 4 --micro-batch 1 --recompute full",
    f"8 {NARROW} --dp 8 --zero 3 --global-batch 16 --micro-batch 2",
    f"8 {NARROW} --dp 8 --zero 2 --global-batch 16 --micro-batch 1",
    f"4 {WIDE} {BF16} --tp 4 --global-batch 4 --micro-batch 2",
    f"4 {WIDE} {BF16} --tp 4 --global-batch 4 --micro-batch 1",
    f"4 {WIDE} --tp 4 --global-batch 4 --micro-batch 4 --recompute full",
    f"8 {LONG} {BF16} --tp 8 --global-batch 2 --micro-batch 2 --recompute selective",
    f"8 {WIDE} {BF16} --tp 4 --dp 2 --zero 3 --global-batch 4 --micro-batch 1",
    f"2 {WIDE} {BF16} --pp 2 --global-batch 8 --micro-batch 1",
    f"4 {NARROW} {BF16} --pp 4 --global-batch 32 --micro-batch 4",
    f"4 {NARROW} --pp 4 --global-batch 32 --micro-batch 4 --recompute full",
    f"4 {NARROW} {BF16} --pp 4 --global-batch 4 --micro-batch 2",
    f"4 {WIDE} {BF16} --pp 2 --tp 2 --global-batch 8 --micro-batch 1",
    f"4 {WIDE} {BF16} --pp 2 --dp 2 --zero 2 --global-batch 16 --micro-batch 1",
    f"4 {WIDE} {BF16} --pp 2 --dp 2 --zero 3 --global-batch 16 --micro-batch 1",
    f"4 {NARROW} {BF16} --pp 2 --dp 2 --zero 1 --global-batch 16 --micro-batch 4 --tie-embeddings",
    f"1 {EXPERTS} {BF16} --global-batch 4 --micro-batch 2",
    f"4 {EXPERTS} {BF16} --dp 4 --ep 4 --global-batch 16 --micro-batch 2",
    f"4 {EXPERTS} --dp 4 --ep 2 --zero 1 --global-batch 16 --micro-batch 2",
    f"4 {EXPERTS} {BF16} --dp 4 --ep 2 --zero 2 --global-batch 16 --micro-batch 2",
    f"4 {EXPERTS} {BF16} --dp 4 --ep 2 --zero 3 --global-batch 16 --micro-batch 2",
    f"8 {EXPERTS} {BF16} --tp 2 --dp 4 --ep 8 --global-batch 16 --micro-batch 2 --recompute full",
    f"8 {FINE} {BF16} --dp 8 --ep 8 --global-batch 16 --micro-batch 1",
    f"8 {FINE} {BF16} --dp 4 --pp 2 --ep 4 --global-batch 32 --micro-batch 1",
    f"1 --model llama3-8b --layers 4 --seq-len 4096 {BF16} --global-batch 2 --micro-batch 1",
    f"16 --model llama3-8b --seq-len 4096 {BF16} --dp 4 --tp 4 --zero 1 --global-batch 8 --micro-batch 1",
    f"8 --model llama3-1b --seq-len 4096 {BF16} --dp 8 --zero 3 --global-batch 16 --micro-batch 2",
    f"64 --model llama3-70b --seq-len 4096 {BF16} --tp 8 --pp 8 --global-batch 16 --micro-batch 1 --recompute full",
    f"8 --model mixtral-8x7b --layers 6 --seq-len 4096 {BF16} --dp 8 --ep 8 --zero 1 --global-batch 8 --micro-batch 1",
    f"4 {LONG} --dp 2 --tp 2 --global-batch 2 --micro-batch 1 --vocab 1000 --seq-len 128",
    f"2 {FINE} --pp 2 --global-batch 4 --micro-batch 1",
    f"16 {FINE} {BF16} --dp 2 --pp 2 --tp 2 --cp 2 --ep 4 --zero 1 --global-batch 16 --micro-batch 2",
    f"4 {WIDE} {BF16} --dp 4 --zero 3 --zero-replicas 2 --global-batch 16 --micro-batch 2",
    f"2 {TINY} --cp 2 --global-batch 2",
    f"4 {WIDE} {BF16} --dp 4 --zero 2 --zero-replicas 2 --global-batch 4 --micro-batch 1",
    f"8 {NARROW} {BF16} --dp 4 --pp 2 --zero 3 --zero-replicas 2 --global-batch 32 --micro-batch 1",
    f"8 {EXPERTS} {BF16} --dp 8 --ep 4 --zero 2 --zero-replicas 4 --global-batch 16 --micro-batch 1",
    f"8 {EXPERTS} {BF16} --dp 8 --ep 2 --zero 3 --zero-replicas 2 --global-batch 16 --micro-batch 1",
    f"4 {WIDE} {BF16} --dp 4 --zero 3 --zero-replicas 4 --global-batch 4 --micro-batch 1",
    f"4 {TINY} --cp 2 --tp 2 --global-batch 2",
]

# Latent attention and multi-token prediction; the first in `make test`
WHOLE = [
    f"4 {DEEPSEEK} {BF16} --global-batch 4 --micro-batch 1 --dp 2 --cp 2 --zero 3 --layers 2 --ep 4",
    f"8 {DEEPSEEK} {BF16} --global-batch 16 --micro-batch 1 --pp 2 --dp 4 --ep 4 --zero 1",
    f"8 {DEEPSEEK} {BF16} --global-batch 16 --micro-batch 2 --pp 2 --dp 2 --tp 2 --ep 4 --zero 1 --recompute selective",
    f"8 {DEEPSEEK} {BF16} --global-batch 16 --micro-batch 1 --cp 2 --dp 2 --tp 2 --ep 4 --zero 3",
    f"8 {DEEPSEEK} {BF16} --global-batch 16 --micro-batch 1 --dp 2 --tp 4 --ep 2 --zero 2 --recompute full",
    f"1 {LATENT} {BF16} --global-batch 4 --micro-batch 2",
    f"1 {LATENT} --global-batch 4 --micro-batch 2 --latent 0,64,64,32,64",
    f"1 {LATENT} --global-batch 4 --micro-batch 1 --recompute selective",
    f"1 {LATENT} {BF16} --global-batch 4 --micro-batch 1 --recompute selective --latent 64,64,64,32,96",
    f"1 {LATENT} {BF16} --global-batch 4 --micro-batch 1 --recompute full",
    f"2 {LATENT} {BF16} --global-batch 4 --micro-batch 2 --tp 2",
    f"2 {LATENT} {BF16} --global-batch 4 --micro-batch 1 --tp 2 --latent 64,512,64,32,64",
    f"2 {LATENT} {BF16} --global-batch 4 --micro-batch 1 --tp 2 --latent 0,512,64,32,64 --recompute selective",
    f"2 {LATENT} {BF16} --global-batch 4 --micro-batch 1 --cp 2",
    f"2 {LATENT} {BF16} --global-batch 4 --micro-batch 1 --cp 2 --recompute selective",
    f"4 {LATENT} --global-batch 4 --micro-batch 2 --cp 2 --tp 2",
    f"4 {LATENT} {BF16} --global-batch 4 --micro-batch 2 --cp 4 --latent 64,512,32,64,96",
    f"4 {LATENT} {BF16} --global-batch 8 --micro-batch 1 --tp 2 --pp 2 --schedule zb-h1",
    f"4 {LATENT} {BF16} --global-batch 8 --micro-batch 1 --cp 2 --pp 2 --schedule zb-h1",
    f"4 {LATENT} {BF16} --global-batch 8 --micro-batch 1 --pp 2 --dp 2 --zero 3 --recompute full",
    f"1 {SECOND} --global-batch 2 --tie-embeddings --vocab 8000",
    f"1 {SECOND} {BF16} --global-batch 2 --recompute full --ffn 4096",
    f"2 {SECOND} {BF16} --global-batch 2 --tp 2",
    f"4 {SECOND} {BF16} --global-batch 8 --tp 2 --pp 2",
    f"4 {SECOND} {BF16} --global-batch 8 --dp 4 --zero 3",
    f"4 {SECOND} {BF16} --global-batch 8 --dp 2 --pp 2 --zero 1 --tie-embeddings",
    f"2 {SECOND} {BF16} --global-batch 8 --pp 2 --schedule zb-h1",
]

INTERLEAVED = [
    f"2 {NARROW} {BF16} --pp 2 --global-batch 16 --micro-batch 2 --virtual-stages 2",
    f"2 {WIDE} --pp 2 --global-batch 4 --micro-batch 2 --virtual-stages 3",
    f"4 {NARROW} {BF16} --pp 2 --dp 2 --zero 1 --global-batch 32 --micro-batch 4 --recompute full --virtual-stages 4",
    f"4 {WIDE} {BF16} --pp 2 --dp 2 --zero 3 --global-batch 16 --micro-batch 1 --virtual-stages 2",
    f"4 {WIDE} {BF16} --pp 2 --tp 2 --global-batch 16 --micro-batch 2 --virtual-stages 2",
    f"1 {WIDE} --global-batch 4 --micro-batch 1 --tie-embeddings",  # both stages hold the matrix
    f"2 {SECOND} {BF16} --dp 2 --zero 1 --global-batch 8",
    f"2 {SECOND} {BF16} --mtp 0 --dp 2 --zero 2 --global-batch 8",  # each stage has buckets of its own
    f"2 {SECOND} {BF16} --mtp 0 --dp 2 --zero 3 --global-batch 8 --tie-embeddings",
]

# How attention sees other ranks' keys
CONTEXT = [
    f"4 {LONG} {BF16} --cp 4 --global-batch 1 --micro-batch 1 --ffn 512 --vocab 1000 --kv-heads 8",
    f"2 {LONG} {BF16} --cp 2 --global-batch 2 --micro-batch 1",
    f"4 {LONG} {BF16} --cp 4 --global-batch 4 --micro-batch 2",
    f"4 {LONG} {BF16} --cp 4 --global-batch 4 --micro-batch 2 --recompute selective",
    f"4 {LONG} --cp 4 --global-batch 4 --micro-batch 2 --recompute full",
    f"8 {LONG} {BF16} --cp 2 --tp 2 --pp 2 --global-batch 8 --micro-batch 1",
    f"8 {LONG} {BF16} --cp 2 --dp 4 --zero 3 --global-batch 8 --micro-batch 1",
    f"8 {LONG} {BF16} --cp 4 --tp 2 --global-batch 2 --micro-batch 1 --recompute selective",
    f"8 {LONG} {BF16} --cp 8 --global-batch 2 --micro-batch 1 --ffn 1024 --vocab 1000 --kv-heads 16",
    f"4 {NARROW} --cp 4 --global-batch 4 --micro-batch 4 --vocab 1000",
    f"8 {EXPERTS} {BF16} --cp 2 --dp 4 --ep 4 --zero 1 --global-batch 16 --micro-batch 2",
    f"2 {TINY} {BF16} --cp 2 --global-batch 2",
]
CONTEXT = [f"{case} --cp-mode {mode}" for case in CONTEXT for mode in ("allgather", "ring", "ulysses")]

# Other schedules with one stage per rank; the first in `make test`
SCHEDULES = [
    f"2 {NARROW} {BF16} --schedule zb-h1 --pp 2 --global-batch 4 --micro-batch 1",
    f"2 {WIDE} {BF16} --schedule zb-h1 --pp 2 --global-batch 8 --micro-batch 1",
    f"4 {NARROW} {BF16} --schedule zb-h1 --pp 4 --global-batch 32 --micro-batch 4",
    f"4 {NARROW} --schedule zb-h1 --pp 4 --global-batch 32 --micro-batch 4 --recompute full",
    f"4 {WIDE} {BF16} --schedule zb-h1 --pp 2 --tp 2 --global-batch 8 --micro-batch 2",
    f"4 {WIDE} --schedule zb-h1 --pp 2 --tp 2 --global-batch 4 --micro-batch 1 --recompute full",
    f"4 {WIDE} {BF16} --schedule zb-h1 --pp 2 --dp 2 --zero 3 --global-batch 16 --micro-batch 1",
    f"4 {NARROW} {BF16} --schedule zb-h1 --pp 2 --dp 2 --zero 1 --global-batch 16 --micro-batch 4 --tie-embeddings",
    f"8 {LONG} {BF16} --schedule zb-h1 --cp 2 --tp 2 --pp 2 --global-batch 8 --micro-batch 1",
    f"4 {LONG} {BF16} --schedule zb-h1 --cp 2 --pp 2 --global-batch 8 --micro-batch 1 --recompute selective",
    f"8 --model llama3-70b --layers 8 --schedule zb-h1 --seq-len 4096 {BF16} --tp 2 --pp 4 --global-batch 8"
    " --micro-batch 1 --recompute full",
    f"4 {NARROW} {BF16} --schedule zb-h2 --pp 4 --global-batch 32 --micro-batch 4",
    f"4 {NARROW} {BF16} --schedule afab --pp 4 --global-batch 32 --micro-batch 4",
    f"2 {WIDE} {BF16} --schedule afab --pp 2 --global-batch 4 --micro-batch 1 --recompute full",
    f"4 {WIDE} {BF16} --schedule afab --pp 2 --tp 2 --global-batch 8 --micro-batch 2",
    f"2 {WIDE} {BF16} --schedule naive --pp 2 --global-batch 4 --micro-batch 1",
    f"2 {EXPERTS} {BF16} --schedule zb-h1 --pp 2 --global-batch 4 --micro-batch 1",
    f"4 {EXPERTS} {BF16} --schedule zb-h1 --dp 2 --ep 2 --pp 2 --global-batch 8 --micro-batch 1",
    f"2 {EXPERTS} {BF16} --schedule zb-h2 --pp 2 --global-batch 8 --micro-batch 1",
    f"4 {EXPERTS} {BF16} --schedule zb-h1 --tp 2 --pp 2 --global-batch 8 --micro-batch 2",
    f"8 {EXPERTS} --schedule zb-h1 --dp 2 --pp 4 --ep 2 --zero 2 --global-batch 16 --micro-batch 2",
    f"8 {EXPERTS} {BF16} --schedule zb-h1 --pp 2 --cp 2 --dp 2 --ep 4 --zero 3 --global-batch 8 --micro-batch 2",
    f"2 {FINE} --schedule zb-h1 --pp 2 --global-batch 4 --micro-batch 1",
    f"4 {FINE} {BF16} --schedule zb-h1 --dp 2 --ep 2 --pp 2 --global-batch 8 --micro-batch 1",
    f"8 {FINE} {BF16} --schedule zb-h1 --dp 2 --tp 2 --pp 2 --ep 2 --global-batch 8 --micro-batch 1",
    f"8 {FINE} {BF16} --schedule zb-h1 --dp 2 --tp 2 --pp 2 --ep 4 --zero 1 --global-batch 16 --micro-batch 2"
    " --recompute full",
]


def compare(case: str):
    """For the first rank of each stage: stage, the fullest moment, the formula's bytes by kind, and the dry run."""
    world, *words = case.split()
    config = configuration([*words, "--data", "synthetic", "--steps", "1"], int(world))
    for stage, rank in enumerate(first_ranks(degrees_of(config))):
        (moment, held), run = peak(config.model_config, Layout.of(config), stage), dry_run(config, rank)
        sent = held["communication"], run.at_peak["communication"]
        print(
            f"{case}, stage {stage}: {sum(held.values()) / run.peak - 1:+.3%} of the peak; communication, bytes: {sent}"
        )
        yield stage, moment, held, run


EVERY = bool(os.environ.get("TEST_ALL"))
EACH = [*CASES, *CONTEXT, *SCHEDULES, *WHOLE]


@pytest.mark.parametrize("case", EACH if EVERY else [*CASES[::25], SCHEDULES[0], WHOLE[0]])
def test_the_formula_is_the_dry_run(case):
    """The peak within 2 %, and its parameters, gradients and optimizer state within 1 %, gathered weights and buckets
    included. So is communication but for vectors, up to 0.01 % of the peak. Measured: 0.01 %, at worst 0.12 %; with
    latent attention or multi-token prediction, 0.1 %, at worst 0.8 %.
    """
    for stage, moment, held, run in compare(case):
        assert sum(held.values()) == pytest.approx(run.peak, rel=0.02), (stage, moment, held, run.at_peak)
        sent = pytest.approx(run.at_peak["communication"], rel=0.01, abs=1e-4 * run.peak)
        assert held["communication"] == sent, (stage, moment)
        for kind in KINDS:
            if not (kind == "gradients" and moment.endswith("added up")):  # a bucket that is being made has no kind yet
                assert held[kind] == pytest.approx(run.at_peak[kind], rel=0.01), (stage, moment, kind)


@pytest.mark.parametrize("case", INTERLEAVED if EVERY else INTERLEAVED[1:2])
def test_interleaved_stages(case):
    """The peak within 2 %; measured are 0.2 % on average and 0.6 % at worst."""
    for stage, moment, held, run in compare(f"{case} --schedule interleaved"):
        assert sum(held.values()) == pytest.approx(run.peak, rel=0.02), (stage, moment, held, run.at_peak)
