"""What the flags of steps 5, 6 and 7 cannot mean is refused by one line, which names the flags and their values."""

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
REFUSED = {  # by step and world size: flags named in the error line | that are only given | that are only named
    (5, 2): f"""--schedule nonsense | --pp 2; --virtual-stages 1 | --pp 2 --schedule zbv | --schedule zbv;
    --virtual-stages 2 | --pp 2 --schedule 1f1b | --schedule 1f1b; --consecutive 4 | --pp 2 | --schedule llama3 1f1b;
    --schedule llama3 | --pp 2 --consecutive 1 | 1 --pp 2; | {OWN} FOLDER/own.csv | schedule own deadlock rank 0;
    | {OWN} FOLDER/own.csv --schedule afab | --schedule-file; | {OWN} FOLDER/none.csv | exist;
    | {OWN} FOLDER | .csv; | {OWN} FOLDER/own.csv --global-batch 8 | micro-batches 4 8""",
    (5, 3): """--schedule dualpipe | --pp 3 --layers 6 | even --pp 3;
    --pp 3 | --schedule interleaved --layers 6 --global-batch 4 --micro-batch 1 | 4 micro-batches multiple""",
    (5, 4): f"""--zero 2 --schedule dualpipe | --pp 2 | copies; --schedule zbv --layers 7 | --pp 4 | 8;
    --pp 4 | {OWN} FOLDER/own.csv --pp 4 | --pp 2""",
    (6, 2): "--cp 2 --cp-split zigzag --seq-len 30; --cp 2 --seq-len 31 | --cp-split contiguous",
    (6, 3): "--cp 3 --seq-len 32 | --cp-split striped; --cp 3 --cp-mode ulysses --heads 8",
    (6, 4): "--cp 4 --cp-split zigzag --seq-len 36; --cp 4 --cp-mode ulysses --kv-heads 6 | --heads 12",
    (6, 16): "--cp 4 --tp 4 --cp-mode ulysses --heads 8",
    (7, 1): """--top-k 3 | | --experts; --capacity-factor 1.0 | | --experts; --ep 2 | | --experts;
    --top-k 5 --experts 4; --experts -1; --dense-layers 4 --layers 4 | --experts 4;
    --aux-coef 0.1 | --experts 4 --balance bias | --balance aux; --bias-rate 0.1 | --experts 4 | --balance bias;
    --bias-rate 0.0 | --experts 4; --expert-groups 2 | --experts 4 | --node-limit;
    --node-limit 1 | --experts 4 | --expert-groups; --expert-groups 3 --experts 4 | --node-limit 1;
    --node-limit 3 --expert-groups 2 | --experts 4; --node-limit 1 --top-k 3 | --experts 4 --expert-groups 2 | 2""",
    (7, 2): """--ep 2 | --experts 4 --pp 2 | 1;
    --tp 2 | --experts 4 --kv-heads 2 --no-sequence-parallel | --experts parallelism""",
    (7, 3): "--ep 3 --experts 4 | --global-batch 6",
}


@pytest.mark.parametrize("step, world, case", [(*key, each) for key in REFUSED for each in REFUSED[key].split(";")])
def test_refusals_name_flags_and_values_in_one_line(step, world, case, tmp_path):
    (tmp_path / "own.csv").write_text(DEADLOCK)
    named, scene, also = (case.replace("FOLDER", str(tmp_path)).split("|") + ["", ""])[:3]
    with pytest.raises(UsageError) as refused:
        configure(step, f"{BASE} {scene} {named}", world)
    words = {word.strip("':;,()") for word in str(refused.value).split()}
    assert set(f"{named} {also}".split()) <= words and "\n" not in str(refused.value), refused.value


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
