"""What steps 2 to 7 are trained with: hard cases line by line, and flags of which any two meet in some case."""

import functools
import itertools
import os

from step05_pipeline.schedules.catalogue import SCHEDULES
from tests.parity.pairwise import pairwise, spelled_out, thin
from tests.parity.runs import ADAMW, SGD, TIED, UNTIED

ALL = bool(os.environ.get("TEST_ALL"))
NAIVE, WHOLE, STEP = "--attention naive", "--no-sequence-parallel", "--zero-reduce step"
PLAIN, OVERLAP, CHUNKED = (f"--tp-mode {mode}" for mode in ("plain", "overlap", "chunked"))
RING, GATHER, ULYSSES = (f"--cp-mode {mode}" for mode in ("ring", "allgather", "ulysses"))
ZIGZAG, CONTIGUOUS, STRIPED = (f"--cp-split {split}" for split in ("zigzag", "contiguous", "striped"))
MHA, GQA, MQA = (f"--kv-heads {heads}" for heads in (4, 2, 1))  # of 4 heads
LATENT = "--kv-heads 4 --latent 24,16,8,4,12"  # queries of a latent, and values that are as wide as keys; or neither
LATENT_KEYS = "--kv-heads 4 --latent 0,16,8,4,6"
ONE, TWO, FOUR = "--micro-batch 12", "--micro-batch 6", "--micro-batch 3"  # that many micro-batches, with --dp 1
ODD = "--hidden 20 --heads 2 --kv-heads 1 --ffn 27"  # shards on 3 and 4 ranks cut rows, on 3 they need padding
TINY = "--hidden 2 --heads 1 --kv-heads 1 --ffn 1 --layers 1"
PADDED = "--vocab 257"  # a prime
THREE = "--hidden 24 --layers 1"  # 3 and 6 heads divide it
DOCUMENTS = "--mask-documents --seq-len 72"  # of 96 tokens: three samples of four have the end of one, each elsewhere
AUX, BIAS = "--aux-coef 0.1 --z-coef 0.01", "--balance bias --bias-rate 0.003"
LIMIT, CAPACITY, SHARED = "--expert-groups 4 --node-limit 2", "--capacity-factor 0.9", "--shared-experts 1"
FEW_TOKENS = "--experts 64 --seq-len 4 --global-batch 2 --micro-batch 1"
REPLICAS = "--zero 3 --zero-replicas 2"

# ---- hard cases: ranks (0: this process) and flags; a word like 0|1|3 stands for a case with each --------------------

HARD = {
    2: f"""
        2|4 {TIED} {SGD} --recompute full --dp-mode bucket --bucket-mb 0.02
        2|4 {TIED} {ADAMW} --recompute selective {NAIVE} --dp-mode overlap
        2|4 {UNTIED} {SGD} {MQA} --dp-mode bucket
        2|4 {UNTIED} {ADAMW} {MHA} --dp-mode naive
        2|4 {TIED} {SGD} --global-batch 24 --micro-batch 2 --dp-mode bucket
    """,
    3: f"""
        # One process: every stage is step 1
        0 {UNTIED} {ADAMW} --zero 0 --micro-batch 4 --bucket-mb 0.02
        0 {TIED} {SGD} --zero 1 --micro-batch 4 --bucket-mb 0.02
        0 {UNTIED} {SGD} --zero 2 --micro-batch 4 --bucket-mb 0.02
        0 {TIED} {ADAMW} --zero 3 --micro-batch 4 --bucket-mb 0.02
        # Naive and overlap, as in step 2
        2 {UNTIED} {ADAMW} --zero 0 --dp-mode naive
        3 {TIED} {SGD} --zero 0 --dp-mode overlap --recompute full
        # A recomputed layer is gathered once for its backward, in each micro-batch
        3 {UNTIED} {ADAMW} --zero 3 --recompute full --micro-batch 2
        2 {UNTIED} {ADAMW} --zero 3 --recompute selective {NAIVE} --micro-batch 3 {STEP}
        # A tied matrix is needed by the first and the last region, and gets gradients from both
        2 {TIED} {SGD} --zero 3
        3 {TIED} {ADAMW} --zero 3 --recompute full {ODD}
        4 {TIED} {ADAMW} --zero 3 --zero-replicas 2 {STEP}
        # Gradients of all micro-batches, then one reduce-scatter
        3 {UNTIED} {ADAMW} --zero 2 {STEP} --bucket-mb 0.02
        2 {UNTIED} {SGD} --zero 3 {STEP} --recompute full
        # Shards are summed over the replicas once, after the last micro-batch; then shards of a single rank
        4 {UNTIED} {ADAMW} --zero 1|2|3 --zero-replicas 2 --bucket-mb 0.02 {ODD}
        2 {UNTIED} {ADAMW} --zero 1|2|3 --zero-replicas 2 --micro-batch 2
        # One layer, and more layers than the prefetch spans
        2 {UNTIED} {ADAMW} --zero 3 --layers 1 --micro-batch 6
        2 {TIED} {SGD} --zero 3 --layers 5 --micro-batch 6
        # So small that some ranks own nothing of some units, or no matrix in them
        4 {TIED} {ADAMW} {TINY} --zero 3 --micro-batch 3
        4 {UNTIED} {ADAMW} {TINY} --zero 1 --micro-batch 3 --bucket-mb 1e-6
        3 {UNTIED} {SGD} {TINY} --zero 2 --bucket-mb 1e-6
        # Grouped queries in every form, and latent attention
        3 {UNTIED} {ADAMW} --kv-heads 1|4 --zero 3 --micro-batch 4
        2 {TIED} {ADAMW} {LATENT_KEYS} --zero 3 --micro-batch 3 --recompute selective
    """,
    4: f"""
        # One process: without --tp nothing is divided, whatever the other flags say
        0 {UNTIED} {ADAMW} {PADDED} {WHOLE} {PLAIN} {ONE} --zero 1
        0 {UNTIED} {ADAMW} {PADDED} {CHUNKED} {ONE} --zero 1
        # A K/V head on several ranks, and shards that cut its gradient
        2 {UNTIED} {ADAMW} --tp 2 {MQA} {ONE} --zero 2
        4 {UNTIED} {SGD} --tp 4 {GQA} {ONE} {WHOLE}
        4 {UNTIED} {ADAMW} --tp 2 --hidden 20 --heads 2 {MQA} --ffn 26 --micro-batch 6 --zero 3 --recompute full
        # Latent attention: each rank has some heads, and all of the latents
        2 {UNTIED} {ADAMW} --tp 2 {LATENT} {ONE} {CHUNKED} --recompute selective
        4 {TIED} {SGD} --tp 4 {LATENT_KEYS} {ONE} {WHOLE}
        # A tied matrix with padding: embedding, head and its gradients from both
        2 {TIED} {SGD} --tp 2 {PADDED} {ONE} --zero 3 --recompute full
        4 {TIED} {ADAMW} --tp 4 {PADDED} {ONE}
        4 {TIED} {ADAMW} --tp 2 {PADDED} --micro-batch 6 --zero 3 {WHOLE}
        # One token of a sequence on each rank; one sequence in a batch; a whole sequence of any length
        2 {UNTIED} {SGD} --tp 2 --seq-len 2 {ONE} {CHUNKED}
        2 {TIED} {ADAMW} --tp 2 --global-batch 1 --micro-batch 1
        4 {UNTIED} {ADAMW} --tp 4 --seq-len 4 --global-batch 2 --micro-batch 1 {CHUNKED}
        2 {UNTIED} {ADAMW} --tp 2 --seq-len 23 {ONE} {WHOLE}
        # The recomputed forward communicates as the first one did, in each micro-batch
        2 {UNTIED} {ADAMW} --tp 2 --micro-batch 3 --recompute full {CHUNKED}
        2 {UNTIED} {SGD} --tp 2 --micro-batch 6 --recompute full {WHOLE} {OVERLAP}
        # Hybrid sharding, sums of shards after the last micro-batch
        4 {UNTIED} {ADAMW} --tp 2 --micro-batch 3 --zero 3 --zero-replicas 2
        4 {UNTIED} {SGD} --tp 2 --micro-batch 3 --zero 2 {STEP} --bucket-mb 0.02
        # Gradients of replicas all-reduced early, late, in small buckets
        4 {UNTIED} {ADAMW} --tp 2 --micro-batch 6 --dp-mode naive
        4 {TIED} {ADAMW} --tp 2 --micro-batch 6 --dp-mode overlap {MQA}
        2 {UNTIED} {ADAMW} --tp 2 {ONE} --bucket-mb 0.001
        # Smallest and deeper
        2 {UNTIED} {ADAMW} --tp 2 --hidden 4 --heads 2 {MQA} --ffn 2 --layers 1 {ONE}
        3 {TIED} {SGD} --tp 3 {THREE} --heads 6 --kv-heads 6 --ffn 27 --layers 3 {ONE}
    """,
    5: f"""
        # One process: gradient accumulation, under any schedule
        0 {TIED} {ADAMW} --schedule zb-h1 --zero 1
        0 {TIED} {ADAMW} --schedule interleaved --virtual-stages 2
        # Two copies of the model
        4 {TIED} {ADAMW} --pp 4 --layers 5 --schedule dualpipe --micro-batch 1
        4 {TIED} {ADAMW} --pp 2 --dp 2 --schedule dualpipe --zero 1 --bucket-mb 0.01
        4 {UNTIED} {SGD} --pp 2 --tp 2 {FOUR} --schedule dualpipe --kv-heads 1
        # With data parallelism in every stage of ZeRO
        4 {TIED} {ADAMW} --pp 2 --micro-batch 2 --schedule 1f1b --zero 0|1|3
        4 {UNTIED} {ADAMW} --pp 2 --micro-batch 2 --schedule zb-h1 --zero 2 --bucket-mb 0.01
        4 {TIED} {SGD} --pp 2 --micro-batch 2 --layers 4 --schedule zbv --zero 3 {STEP}
        4 {TIED} {ADAMW} --pp 2 --micro-batch 2 --layers 4 --schedule zbv --zero 1 --zero-replicas 2
        4 {TIED} {SGD} --pp 2 --schedule zb-h2 --dp-mode naive
        4 {UNTIED} {SGD} --pp 2 --schedule interleaved --layers 6 --virtual-stages 3 --dp-mode overlap
        # With tensor and sequence parallelism
        4 {TIED} {ADAMW} --pp 2 --tp 2 {FOUR} {PADDED} --schedule 1f1b --recompute full
        4 {UNTIED} {ADAMW} --pp 2 --tp 2 {FOUR} --layers 4 --schedule zbv {PLAIN}
        4 {TIED} {SGD} --pp 2 --tp 2 {FOUR} --layers 4 --schedule dualpipev {WHOLE} --recompute full
        4 {UNTIED} {SGD} --pp 2 --tp 2 {FOUR} --schedule zb-h1 {CHUNKED} --kv-heads 1
        # All at once
        8 {TIED} {ADAMW} --dp 2 --pp 2 --tp 2 {FOUR} --schedule 1f1b --zero 1
        8 {UNTIED} {ADAMW} --dp 2 --pp 2 --tp 2 {FOUR} --layers 4 --schedule interleaved --zero 3 --recompute full
        8 {TIED} {ADAMW} --dp 2 --pp 2 --tp 2 {FOUR} --layers 4 --schedule zbv --zero 2 {PADDED}
        # More stages on a rank, fewer micro-batches than stages
        2 {UNTIED} {SGD} --pp 2 --layers 8 --virtual-stages 4 --schedule breadth-first --micro-batch 12
        2 {TIED} {SGD} --pp 2 --layers 6 --virtual-stages 3 --schedule llama3 --consecutive 3 --micro-batch 2
    """,
    6: f"""
        # One process: without --cp nothing is divided
        0 {UNTIED} {ADAMW} {ULYSSES} {STRIPED} {ONE}
        # Gradients are reduced over dp x cp, whichever of them is 1
        2 {UNTIED} {ADAMW} --cp 2 --micro-batch 4 --zero 3 --zero-replicas 2
        2 {TIED} {SGD} --cp 2 {TWO} --dp-mode overlap {MQA}
        4 {UNTIED} {ADAMW} --cp 2 --dp 2 --micro-batch 3 --zero 2 --zero-replicas 2 --bucket-mb 0.02
        4 {TIED} {SGD} --cp 4 --dp 1 {ONE} --zero 3 {STEP} --recompute full
        # One token in a chunk
        2 {UNTIED} {ADAMW} --cp 2 --seq-len 4 {ONE}
        4 {TIED} {ADAMW} --cp 4 --seq-len 4 --global-batch 1 --micro-batch 1 {STRIPED} {GATHER}
        # Tensor and sequence parallelism: positions of a part of a part, K/V heads on several ranks
        4 {UNTIED} {ADAMW} --cp 2 --tp 2 {TWO} {MQA} {STRIPED} {CHUNKED} {PADDED}
        4 {TIED} {SGD} --cp 2 --tp 2 {ONE} {MQA} {ULYSSES} {PLAIN} --recompute full
        # Latents travel, or with Ulysses what they are expanded to; also where one weight's gradient is put off
        2 {UNTIED} {ADAMW} --cp 2 {TWO} {LATENT_KEYS} {GATHER} {NAIVE}
        4 {TIED} {SGD} --cp 4 {ONE} {LATENT} {STRIPED} --recompute selective
        4 {UNTIED} {ADAMW} --cp 2 --pp 2 {TWO} {LATENT} --schedule zb-h1 --zero 1
        # All at once
        8 {TIED} {ADAMW} --cp 2 --tp 2 --pp 2 {TWO} --zero 1
        8 {UNTIED} {SGD} --cp 2 --dp 2 --pp 2 --micro-batch 3 --layers 4 --schedule zbv --zero 3 {GATHER}
        # Masked documents
        2 {DOCUMENTS} {UNTIED} {ADAMW} --cp 2 {TWO}
        2 {DOCUMENTS} {UNTIED} {ADAMW} --cp 2 {TWO} {ULYSSES} {STRIPED}
        4 {DOCUMENTS} {TIED} {SGD} --cp 4 {ONE} {CONTIGUOUS} --recompute full
        4 {DOCUMENTS} {UNTIED} {ADAMW} --cp 2 --pp 2 {TWO} --layers 4 --schedule zbv {STRIPED} {NAIVE}
        4 {DOCUMENTS} {UNTIED} {ADAMW} --cp 2 --dp 2 --micro-batch 3 {GATHER} --zero 3
    """,
    7: f"""
        # One process: micro-batches and recomputation
        0 {ADAMW} --expert-ffn 20 --experts 6 {AUX} {CAPACITY} --recompute full --micro-batch 3
        0 {ADAMW} --expert-ffn 20 --experts 6 {AUX} {CAPACITY} --recompute selective --micro-batch 2 --zero 1
        # Without experts
        4 {ADAMW} --cp 2 --pp 2 {TWO} --schedule zb-h1 --zero 3
        # Most experts get no token, and some ranks none at all
        2 {ADAMW} {FEW_TOKENS} --top-k 1 --dp 2 --ep 2 --zero 3
        4 {SGD} {FEW_TOKENS} --top-k 2 --tp 2 --cp 2 --ep 4 --recompute full {CAPACITY}
        # Both ends of a pipeline hold the embedding
        4 {ADAMW} --experts 8 {TIED} --dp 2 --pp 2 {FOUR} --ep 2 --schedule zb-h1 --zero 1 {BIAS}
        # An expert on several ranks, of which not all share their copies
        4 {ADAMW} --experts 4 --dp 2 --cp 2 {TWO} --ep 2 --zero 2 --zero-replicas 2 --bucket-mb 0.01 {AUX}
        # All at once
        8 {ADAMW} --experts 8 --top-k 3 --gate sigmoid {LIMIT} {SHARED} --dense-layers 1 {BIAS} {CAPACITY} \
            --tp 2 --cp 2 --pp 2 --ep 4 {TWO} --schedule dualpipe --layers 4 --zero 1 --recompute selective
    """,
}
if ALL:
    HARD[4] += f"""
        2 {UNTIED} {SGD} --tp 2 {LATENT} {TWO} {PLAIN}|{WHOLE}|{OVERLAP} --recompute full
        4 {UNTIED} {ADAMW} --tp 2 {LATENT_KEYS} --micro-batch 3 --zero 3 {PLAIN}
    """
    HARD[6] += f"""
        2 {DOCUMENTS} {UNTIED} {ADAMW} --cp 2 {TWO} {LATENT} {CONTIGUOUS} --zero 3
        4 {UNTIED} {SGD} --cp 2 --tp 2 {TWO} {LATENT} {ULYSSES} {WHOLE} --recompute selective
        4 {UNTIED} {ADAMW} --cp 4 {ONE} {LATENT_KEYS} {GATHER} {CONTIGUOUS} --recompute full
        8 {UNTIED} {ADAMW} --cp 2 --tp 2 --pp 2 {TWO} {LATENT} --layers 4 --schedule zbv {CHUNKED} --zero 2
        8 {TIED} {SGD} --cp 2 --tp 2 --dp 2 --micro-batch 3 {LATENT_KEYS} {STRIPED} --zero 3
        4 {UNTIED} {SGD} --cp 4 --seq-len 4 {ONE} {CONTIGUOUS}
        4 {UNTIED} {SGD} --cp 2 --pp 2 {TWO} --schedule dualpipe --zero 1 {CONTIGUOUS}
        8 {UNTIED} {ADAMW} --cp 4 --tp 2 {ONE} {ULYSSES} --heads 8 --kv-heads 4 --recompute full
        8 {TIED} {ADAMW} --cp 4 --pp 2 {TWO} --layers 4 --schedule dualpipev {ULYSSES} {MHA}
        2 {DOCUMENTS} {UNTIED} {ADAMW} --cp 2 {TWO} {GATHER} {CONTIGUOUS}
        4 {DOCUMENTS} {UNTIED} {SGD} --cp 2 --tp 2 {ONE} --zero 1
        4 {DOCUMENTS} {UNTIED} {ADAMW} --tp 2 --pp 2 {TWO} --recompute full
    """
    HARD[7] += f"""
        8 {ADAMW} --experts 8 --top-k 3 --gate sigmoid {LIMIT} {SHARED} --dense-layers 1 {BIAS} --expert-ffn 20 \
            {LATENT} --tp 2 --cp 2 --pp 2 --ep 4 {TWO} --schedule dualpipev --layers 4 --zero 1 --recompute selective
        4 {SGD} --experts 8 {SHARED} --tp 4 --kv-heads 1 --ep 4 {TWO} {CHUNKED} --zero 1 {AUX} {CAPACITY}
        4 {ADAMW} --experts 8 --cp 4 --ep 4 {ONE} {STRIPED} {CAPACITY} {AUX} --seq-len 16
        4 {ADAMW} --experts 8 --cp 4 --ep 4 {ONE} {ULYSSES} {CONTIGUOUS} {MHA} {CAPACITY}
        4 {ADAMW} --experts 8 --dp 4 --ep 2 {FOUR} --dp-mode overlap --mask-documents {BIAS}
        8 {ADAMW} {FEW_TOKENS} --top-k 2 --dp 2 --tp 2 --cp 2 --ep 8 --zero 3 {CAPACITY} {SHARED}
    """


# ---- pairs of flags --------------------------------------------------------------------------------------------------

ZERO = [f"--zero {stage}" for stage in range(4)]
TRAINING = {"embeddings": [TIED, UNTIED], "optimizer": [SGD, ADAMW]}
RECOMPUTE = {"recompute": ["", f"--recompute selective {NAIVE}", "--recompute full"]}
EXPERTS = {
    "recompute": ["", "--recompute selective", "--recompute full"],
    "balance": ["--balance none", AUX, BIAS],
    "gate": ["--gate softmax", "--gate sigmoid"],
    "chosen": ["--top-k 1", f"--top-k 3 {LIMIT}"],
    "capacity": ["", CAPACITY],
    "others": ["", f"{SHARED} --dense-layers 1"],
    "optimizer": [SGD, ADAMW],
}
LAYERS = {2: 5, 3: 7, 4: 9}  # two stages on each rank, and one layer over: stages are of different lengths
# Micro-batches of one sequence: 1 to 9, fewer than ranks, a multiple of them, and neither
BATCHES = {2: [1, 5, 8, 9], 3: [6, 7], 4: [2, 3, 4]}
WITH_CP = [f"1f1b {TWO}", f"zb-h1 {TWO}", f"zbv --layers 4 {TWO}", f"interleaved --layers 4 {TWO}"]
LAYOUTS = {  # by step and ranks
    4: {
        2: [f"--tp 2 {ONE}", "--tp 2 --micro-batch 6"],
        3: [f"--tp 3 {ONE}"],
        4: [f"--tp 4 {ONE}", "--tp 4 --micro-batch 6", "--tp 2 --micro-batch 6", "--tp 2 --micro-batch 3"],
    },
    6: {
        2: [f"--cp 2 {ONE}", "--cp 2 --micro-batch 6"],
        3: [f"--cp 3 {THREE} --heads 6 {ONE}"],
        4: [f"--cp 4 {ONE}", "--cp 2 --dp 2 --micro-batch 3", f"--cp 2 --tp 2 {ONE}", f"--cp 2 --tp 2 {ONE} {WHOLE}"]
        + [f"--cp 2 --pp 2 --schedule {name}" for name in WITH_CP],
    },
    7: {
        2: [f"--ep 2 --dp 2 {FOUR}", f"--ep 2 --cp 2 {ONE}", f"--ep 2 --tp 2 {TWO}", f"--pp 2 {TWO} --schedule 1f1b"],
        4: [f"--ep 4 --dp 4 {FOUR}", f"--ep 2 --dp 2 --cp 2 {TWO}"]
        + [f"--ep 4 --dp 2 --tp 2 {FOUR}", f"--ep 2 --cp 2 --tp 2 {ONE}"]
        + [f"--ep 2 --cp 2 --pp 2 {TWO} --schedule zb-h1", f"--ep 2 --tp 2 --pp 2 {TWO} --schedule zbv --layers 4"]
        + [f"--ep 2 --dp 2 --pp 2 {FOUR} --schedule {name}" for name in ("interleaved --layers 4", "dualpipe")],
        8: [f"--ep 8 --dp 2 --cp 2 --tp 2 {TWO}", f"--ep 4 --dp 2 --tp 2 --pp 2 {FOUR} --schedule 1f1b"]
        + [f"--ep 4 --cp 2 --tp 2 --pp 2 {TWO} --schedule dualpipev --layers 4"],
    },
}


def pairs(step: int, world: int) -> list[dict]:
    """Cases of a step on so many ranks in which any two values of two kinds of flags meet."""
    layouts = {"layout": LAYOUTS[step][world]} if step in LAYOUTS else {}
    accumulation = {"accumulation": ["--micro-batch 1", f"--micro-batch {12 // world}"]}  # many, or a single one
    if step == 2:
        modes = [f"--dp-mode {mode}" for mode in ("naive", "overlap", "bucket", "bucket --bucket-mb 0.02")]
        factors = TRAINING | {"mode": modes} | accumulation
        return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    if step == 3:
        replicas = ["", *(f"--zero-replicas {copies}" for copies in sorted({2, world}) if world % copies == 0)]
        factors = {"stage": ZERO, "replicas": replicas, "reduce": ["", STEP]} | accumulation | RECOMPUTE | TRAINING
        forbidden = [{"stage": "--zero 0", "replicas": copies} for copies in replicas if copies]
        forbidden += [{"stage": stage, "reduce": STEP} for stage in ZERO[:2]]
        return pairwise(factors | {"bucket": ["", "--bucket-mb 0.02"], "model": ["", MQA, ODD]}, forbidden)
    if step == 4:
        three = [f"{THREE} --heads {heads} --kv-heads {kv_heads}" for heads, kv_heads in ((3, 3), (6, 3), (6, 1))]
        factors = layouts | {"sequence": ["", WHOLE], "mode": [PLAIN, OVERLAP, CHUNKED]}
        factors |= {"heads": three if world == 3 else [MHA, GQA, MQA], "embeddings": [TIED, UNTIED]}
        factors |= {"vocabulary": [""] if world == 3 else ["", PADDED]} | RECOMPUTE  # 3 does not divide 256 either
        factors |= {"stage": ZERO if world == 4 else [ZERO[0], ZERO[3]], "optimizer": [SGD, ADAMW]}
        return pairwise(factors, [{"sequence": WHOLE, "mode": CHUNKED}])
    if step == 5:
        schedules = [name for name in SCHEDULES if name != "dualpipe" or world % 2 == 0]
        factors = {"schedule": [f"--schedule {name}" for name in schedules]}
        factors |= {"batches": [f"--global-batch {count}" for count in BATCHES[world]]} | RECOMPUTE
        factors |= {"embeddings": [TIED, UNTIED], "stage": [ZERO[0], ZERO[3]], "optimizer": [SGD, ADAMW]}
        odd = [f"--global-batch {count}" for count in BATCHES[world] if count % world]
        forbidden = [{"schedule": "--schedule interleaved", "batches": each} for each in odd]
        forbidden += [{"schedule": "--schedule dualpipe", "stage": "--zero 3"}]  # two copies
        layout = {"layout": f"--pp {world} --layers {LAYERS[world]} --micro-batch 1"}
        return [layout | case for case in pairwise(factors, forbidden)]
    if step == 6:
        heads = [f"--kv-heads {heads}" for heads in (6, 3, 1)] if world == 3 else [MHA, GQA, MQA]
        factors = layouts | {"mode": [RING, GATHER, ULYSSES], "split": [ZIGZAG, CONTIGUOUS, STRIPED], "heads": heads}
        factors |= {"embeddings": [TIED, UNTIED]} | RECOMPUTE | {"stage": ZERO, "optimizer": [SGD, ADAMW]}
        return pairwise(factors)
    copies, stages = [layout for layout in LAYOUTS[7][world] if "dualpipe" in layout], [*ZERO, REPLICAS]
    forbidden = [{"layout": each, "stage": stage} for each in copies for stage in stages[2:]]
    alone = [layout for layout in LAYOUTS[7][world] if "--dp" not in layout and "--cp" not in layout]
    forbidden += [{"layout": layout, "stage": REPLICAS} for layout in alone]
    every = pairwise(layouts | {"stage": stages} | EXPERTS, forbidden)
    return [{"experts": "--expert-ffn 20 --experts 8"} | case for case in every]


def hard_cases(step: int) -> dict[int, list[str]]:
    """Flags of a step's hard cases, by number of ranks, and none for those that only pairs have."""
    found = {ranks: [] for ranks in LAYOUTS.get(step, (2, 3, 4))}
    for ranks, *flags in spelled_out(HARD[step]):
        found.setdefault(int(ranks), []).append(" ".join(flags))
    return found


@functools.cache  # pairs take a while, and only the worker that trains them needs them
def cases_of(step: int) -> dict[int, list[str]]:
    """Flags of all cases of a step, by number of ranks."""
    found = hard_cases(step)
    for ranks, cases in thin({ranks: pairs(step, ranks) for ranks in LAYOUTS.get(step, (2, 3, 4))}).items():
        found[ranks] += [" ".join(filter(None, case.values())) for case in cases]
    return found
