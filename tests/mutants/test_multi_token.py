"""The suite rejects every known-wrong variant of multi-token prediction."""

import pytest

from tests.mechanisms.step08.test_multi_token import one_process, train_both
from tests.mutants.patches import assert_applies
from tests.mutants.patches.multi_token import MUTANTS
from tests.parity.cases import ALL, DOCUMENTS, FOUR, ONE, TWO
from tests.parity.runs import ADAMW, UNTIED, assert_parity, results_of, training_of

BASE = f"{UNTIED} {ADAMW} --layers 1"
TRAINED = {  # flags of two ranks: mutants
    f"{BASE} --layers 2 --pp 2 {FOUR}": ("second embedding goes its own way",),
    f"{BASE} --cp 2 {ONE}": ("second targets of a part", "last token not masked"),
    f"{BASE} --tp 2 {ONE}": (
        *("weight on both losses", "final norm shared", "projection's gradient not summed over tp"),
        *("hidden states come first", "second loss counted by all tensor ranks"),
    ),
    f"{BASE} --cp 2 {TWO} {DOCUMENTS}": ("last token of a document not masked",),
}


def test_parity_shows_all_of_them():
    pairs = [(flags, name) for flags, names in TRAINED.items() for name in (None, *names)]
    assert {name for _, name in pairs if name} == MUTANTS.keys()
    assert_applies(*MUTANTS)
    pairs = pairs if ALL else pairs[:4]  # two layouts, and a mutant in each
    for (flags, name), result in zip(
        pairs, results_of(2, train_both, *map(list, zip(*pairs, strict=True))), strict=True
    ):
        expected = one_process(training_of(flags))
        if name is None:
            assert_parity(result, expected, flags)
            continue
        with pytest.raises(AssertionError, match="relative differences above"):
            assert_parity(result, expected, name)
