"""What a layout says for itself in `compare`: orders, schedules, shapes; and layouts that cannot be."""

from dataclasses import replace

from common.presets import PRESETS
from step08_5d.cost import Layout
from step08_5d.planning.__main__ import main
from step08_5d.planning.time.machines import MACHINES
from step08_5d.planning.time.profiles import PROFILES
from step08_5d.planning.time.speed import times

LLAMA, H100 = PRESETS["llama3-8b"], MACHINES["H100"]


def test_what_a_layout_says_is_used_and_named(capsys):
    """tp over nodes is slower, a split backward has less bubble; what cannot be is named, beside the rows that can."""
    words = "--dp 8 --pp 8 --tp 8", "--order dp,pp,cp,tp", "--schedule zb-h1", "--seq-len 8192 --layers 40"
    layouts = [words[0], *(f"{words[0]} {each}" for each in words[1:])]
    main(["compare", "--model", "llama3-8b", "--profile", "megatron", *layouts])
    plain, far, split, longer = capsys.readouterr().out.splitlines()[5:9]
    by, layout = PROFILES["megatron"], Layout(4096, 8, 8, 1, 8, micro_batches=32, dtype="bfloat16")
    for row, named, changed, machine in (
        (plain, "dp 8, tp 8, pp 8, 32 x 1 ", layout, H100),
        (far, ", 32 x 1, --order dp,pp,cp,tp", layout, H100._replace(order="dp,pp,cp,tp")),
        (split, "pp 8, zb-h1, 32 x 1", layout._replace(schedule="zb-h1"), H100),
        (longer, ", --seq-len 8192, --layers 40", layout._replace(seq=8192), H100),
    ):
        model = replace(LLAMA, layers=40) if row is longer else LLAMA
        assert named in row and f" {times(model, changed, machine, by).step:.2f} " in row, row
    assert main(["compare", "--model", "llama3-8b", "--dp 8", "--tp 3", "--pp 2 --schedule naive", '--dp "2']) == 2
    found = capsys.readouterr()
    assert found.out.splitlines()[5].startswith("  dp 8, 32 x 1") and found.err.count("\n") == 1
    assert '"--tp 3": --tp 3 does not divide' in found.err and "--schedule naive is not in the form" in found.err
    assert '"--dp "2": No closing quotation' in found.err and "numbers of GPUs" not in found.out


def test_a_batch_in_tokens_and_what_copies_are(capsys):
    """1M tokens are 256 sequences, which are taken where nothing is said; then a line says so, once."""
    argv = ["compare", "--model", "llama3-8b", "--profile", "megatron", "--dp 64 --tp 4 --zero 1 --zero-replicas 16"]
    main(argv)
    alone = capsys.readouterr().out
    assert "  16 copies: 4 ranks share one optimizer state\n" in alone
    assert alone.endswith("  256 sequences a step, as neither --global-batch nor --tokens-per-batch says otherwise\n")
    main([*argv, "--float8"])
    assert "of the peak in BF16, also with products of 8-bit numbers\n" in capsys.readouterr().out
    main([*argv, "--tokens-per-batch", "1M"])
    assert capsys.readouterr().out == alone[: alone.index("  256 sequences")]
    main([*argv[:-1], "--dp 8 --global-batch 64"])
    assert "says otherwise" not in capsys.readouterr().out
