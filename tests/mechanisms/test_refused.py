"""What flags cannot mean is refused by one line, which names the flags and their values."""

from unittest import mock

import pytest
import torch

from common.errors import UsageError
from common.process_groups import Degrees, build_mesh
from step01_single_gpu.data import batches
from step01_single_gpu.data.token_cache import synthetic
from tests.harness.observing import configure

BASE = "--layers 4 --hidden 48 --heads 8 --ffn 48 --vocab 384 --seq-len 48 --data synthetic --device cpu --steps 1"
DEADLOCK = "F0,F1,B0,B1,F2,F3,B2,B3\nF0,B0,F1,F2,B2,B1,F3,B3\n"  # rank 1 wants F2 before it gives B1 back
OWN = "--pp 2 --micro-batch 1 --global-batch 4 --schedule-file"  # FOLDER/own.csv: the table above
REFUSED = {  # by step, world size and other flags: those named in the error line | only given | only named
    (6, 1, ""): """--seq-len 0; --global-batch -8; --warmup -1; --weight-decay -0.1; --clip nan; --seed -1; --dp 0;
    --lr 0.0; --lr nan; --lr inf; --timeout 2000000.0; --kv-heads 0; --layer-delay -1.0; --compute 0.0;
    --steps many; --dtype int8; --zero 5; --lr; --model llama9; --cp 2; --cp 0; --model mixtral-8x7b;
    --link fast; --link 1,2,3; --link=-1,1; --link nan,1; --link 1,0; --link 1,nan; --trace 5; --trace 5:3;
    --trace a:b; --trace 1:²; --trace=-1:2; --trace 100:100; --heads 3; --hidden 24; --dp 3; --kv-heads 3;
    --model debug | --hidden 100000000000; --seq-len 4096 --model smollm-135m; --global-batch 3; stray; --laye;
    | --trace 3:5 | --trace --run-dir; | --save-every 5 | --save-every --run-dir; --resume auto | | --run-dir;
    --profile | | --trace; --memory-snapshot | | --trace; | --keep 2 | --keep --save-every; --run-dir= | | empty;
    --async-save | | --save-every; --profile --measure-memory | --trace 1:2 --run-dir x""",
    (6, 2, ""): """--tp 2 --dp 2; --tp 4; --tp 2 --seq-len 255; --tp-mode chunked | --tp 2 --no-sequence-parallel;
    --pp 3; --zero-replicas 2; --pp 2 | --virtual-stages 3; --dp-mode naive | --zero 1; --zero-reduce step | --zero 1;
    --zero-reduce step; --cp 2 --dp 2""",
    (6, 3, ""): "--tp 3; --tp 2; --tp 3 --ffn 100 | --heads 6 --hidden 96; --global-batch 8",
    (6, 4, ""): """--dp 2; --zero-replicas 3 | --zero 1; --tp 4 --kv-heads 6 | --heads 12 --hidden 96;
    --cp 2 --tp 2 --pp 2 --dp 1; --tp 2 --cp 2 --seq-len 62; --zero-replicas 3 | --cp 2 --zero 1""",
    (6, 6, ""): "--cp 4; --tp 2 --pp 2; --cp 2 --dp 1; --dp 4",
    (6, 8, ""): "--pp 8; --pp 16",
    (5, 2, BASE): f"""--schedule nonsense | --pp 2; --virtual-stages 1 | --pp 2 --schedule zbv | --schedule zbv;
    --virtual-stages 2 | --pp 2 --schedule 1f1b | --schedule 1f1b; --consecutive 4 | --pp 2 | --schedule llama3 1f1b;
    --schedule llama3 | --pp 2 --consecutive 1 | 1 --pp 2; | {OWN} FOLDER/own.csv | schedule own deadlock rank 0;
    | {OWN} FOLDER/own.csv --schedule afab | --schedule-file; | {OWN} FOLDER/none.csv | exist;
    | {OWN} FOLDER | .csv; | {OWN} FOLDER/own.csv --global-batch 8 | micro-batches 4 8""",
    (5, 3, BASE): """--schedule dualpipe | --pp 3 --layers 6 | even --pp 3;
    --pp 3 | --schedule interleaved --layers 6 --global-batch 4 --micro-batch 1 | 4 micro-batches multiple""",
    (5, 4, BASE): f"""--zero 2 --schedule dualpipe | --pp 2 | copies; --schedule zbv --layers 7 | --pp 4 | 8;
    --pp 4 | {OWN} FOLDER/own.csv --pp 4 | --pp 2""",
    (6, 2, BASE): "--cp 2 --cp-split zigzag --seq-len 30; --cp 2 --seq-len 31 | --cp-split contiguous",
    (6, 3, BASE): "--cp 3 --seq-len 32 | --cp-split striped; --cp 3 --cp-mode ulysses --heads 8",
    (6, 4, BASE): "--cp 4 --cp-split zigzag --seq-len 36; --cp 4 --cp-mode ulysses --kv-heads 6 | --heads 12",
    (6, 16, BASE): "--cp 4 --tp 4 --cp-mode ulysses --heads 8",
    (7, 1, BASE): """--top-k 3 | | --experts; --capacity-factor 1.0 | | --experts; --ep 2 | | --experts;
    --top-k 5 --experts 4; --experts -1; --dense-layers 4 --layers 4 | --experts 4;
    --aux-coef 0.1 | --experts 4 --balance bias | --balance aux; --bias-rate 0.1 | --experts 4 | --balance bias;
    --bias-rate 0.0 | --experts 4; --expert-groups 2 | --experts 4 | --node-limit;
    --node-limit 1 | --experts 4 | --expert-groups; --expert-groups 3 --experts 4 | --node-limit 1;
    --node-limit 3 --expert-groups 2 | --experts 4; --node-limit 1 --top-k 3 | --experts 4 --expert-groups 2 | 2""",
    (7, 2, BASE): """--ep 2 | --experts 4 --pp 2 | 1;
    --tp 2 | --experts 4 --kv-heads 2 --no-sequence-parallel | --experts parallelism""",
    (7, 3, BASE): "--ep 3 --experts 4 | --global-batch 6",
    (8, 1, BASE): """--fp8-gradients e5m2 | | --fp8; --fp8-dispatch | --fp8 tile | --experts;
    --fp8-dispatch | --experts 4 | --fp8; --moments bfloat16 | --optimizer sgd | --optimizer adamw;
    --moments bfloat16 | --dtype float16 | --dtype float16;
    --fp8-gather | --fp8 tile --zero 2 | --zero; --fp8-gather | --zero 3 | --fp8;
    --fp8-gather --fp8 row | --zero 3 | twice; --fp8-gather --fp8 mx | --zero 3 | twice;
    --fp8-gather --dtype float16 | --fp8 tile --zero 3""",
    (8, 2, BASE): """--fp8 tensor --tp-mode chunked | --tp 2; --fp8 row --ep 1 | --tp 2 --experts 4 | tp 2;
    --fp8 naive --tp 2 --kv-heads 1; --fp8 mx --tp 2 | | --heads 24 columns 32;
    --fp8 mx --seq-len 96 | --cp 2 | 4 32; --fp8 tile --seq-len 256 | --cp 2 | 4 128;
    --fp8 mx --cp-split striped | --cp 2 --seq-len 128 | 32;
    --fp8 mx --seq-len 96 | --tp 2 --ep 2 --experts 4 --shared-experts 1 --hidden 256 --ffn 64 | 2 32""",
}


@pytest.mark.parametrize("key, case", [(key, each) for key, cases in REFUSED.items() for each in cases.split(";")])
def test_refusals_name_flags_and_values_in_one_line(key, case, tmp_path):
    (tmp_path / "own.csv").write_text(DEADLOCK)
    step, world, base = key
    named, scene, also = (case.replace("FOLDER", str(tmp_path)).split("|") + ["", ""])[:3]
    with pytest.raises(UsageError) as refused:
        configure(step, f"{base} {scene} {named}", world)
    words = {word.strip("':;,()") for word in str(refused.value).split()}
    assert set(f"{named} {also}".replace("=", " ").split()) <= words and "\n" not in str(refused.value), refused.value


@pytest.mark.parametrize("flags", ["--cp-split contiguous --seq-len 30", "--cp-mode ulysses --tp 4 --kv-heads 2"])
def test_what_is_close_to_it_is_allowed(flags):
    configure(6, f"{BASE} --cp 2 {flags}", 8 if "--tp" in flags else 2)


def test_documents_without_ends():
    config = configure(6, "--data some.txt --tokenizer some/name --mask-documents", 1)
    mesh, corpus = build_mesh(Degrees(), torch.device("cpu")), synthetic(1)._replace(end=None)
    with (
        mock.patch.object(batches, "load_corpus", lambda *_: corpus),
        pytest.raises(UsageError, match="^--mask-documents: --tokenizer some/name has no [^\n]*$"),
    ):
        batches.load_batches(config, mesh)
