"""The bytes of UTF-8 as a tokenizer of transformers, for folders that others open."""


def byte_tokenizer():
    """Return a tokenizer with the ids of ByT5 (byte + 3; 0 pads, 1 ends a document, 259 to 383 are free).

    It is used instead of transformers' ByT5Tokenizer because AutoTokenizer (5.23) does not open that beside a model
    with experts, and because that one fails on the ids of a model whose vocabulary is larger. This one skips them.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # The library writes a byte as a printable letter: as itself, or, if it is none, as the next free one from 256 on
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    free = [f"<extra_id_{index}>" for index in range(125)]
    vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {token: 259 + index for index, token in enumerate(free)}
    vocab |= {chr(byte if byte in visible else 256 + hidden.index(byte)): byte + 3 for byte in range(256)}
    bytes_alone = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))  # no two of them are ever merged
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_alone.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    bytes_alone.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "extra_special_tokens": free}
    return PreTrainedTokenizerFast(tokenizer_object=bytes_alone, **names)
