"""A Hugging Face tokenizer of a few words."""

from pathlib import Path


def save_tokenizer(folder: Path, *words: str, end: str | None = "<eos>") -> str:
    """Write a tokenizer of [UNK], <eos>, the, and `words`, in which `end` ends a document; return its path."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {word: index for index, word in enumerate(["[UNK]", "<eos>", "the", *words])}
    fast = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]", eos_token=end).save_pretrained(folder)
    return str(folder)
