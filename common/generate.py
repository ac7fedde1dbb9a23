"""Let a trained model write: text from a checkpoint of any layout, or from a folder that `common.export` has made.

python -m common.generate RUN_OR_EXPORT --prompt "def main("
"""

import math
import tempfile
from pathlib import Path

import common.entry  # noqa: F401

# isort: split
import torch

from common.checkpoints import files
from common.errors import UsageError, first_line
from common.export import export_checkpoint, quiet_transformers
from common.launching.command_line import OneLineParser, one_line_errors, summary
from common.presets import hub_errors_in_one_line


def opened(source: str, tokenizer: str | None = None):
    """Return the model of transformers and the tokenizer in `source`: a run folder (its newest checkpoint), a
    checkpoint, or a folder that transformers opens.

    A checkpoint is exported to a temporary folder first, so any layout will do, and each model that transformers can
    express. Raises UsageError if it cannot, and for a model of synthetic tokens, which no tokenizer turns into text.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    quiet_transformers()
    path = Path(source)
    trained = (path / files.MANIFEST).is_file() or bool(files.complete(path))
    if not trained and not ((path / "config.json").is_file() and any(path.glob("*.safetensors"))):
        raise UsageError(f"{source} holds no complete checkpoint, nor a model that transformers opens")
    with tempfile.TemporaryDirectory() as folder:
        if trained:
            export_checkpoint(source, folder, tokenizer)
            path = Path(folder)
        if not tokenizer and not (path / "tokenizer_config.json").is_file():
            raise UsageError(f"{source} has no tokenizer; --tokenizer names one, but none fits synthetic tokens")
        with hub_errors_in_one_line(source):
            logging.set_verbosity_error()  # instead of its report: the error below
            model, found = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
            logging.set_verbosity_warning()
        if missing := sorted(found["missing_keys"]):  # transformers would draw them
            raise UsageError(f"{source} lacks {len(missing)} of the model's weights, such as {missing[0]}")
        with hub_errors_in_one_line(f"--tokenizer {tokenizer}" if tokenizer else f"the tokenizer of {source}"):
            return model, AutoTokenizer.from_pretrained(tokenizer or path)


def write(model, tokenizer, prompt: str, tokens: int = 200, temperature: float = 0.8, seed: int = 0) -> str:
    """Print `prompt` and what the model adds to it, as it comes: `tokens` tokens, or until a document ends. Return it.

    The model reads the end of a document before the prompt: in training, that is what the first word of the next one
    comes after. As there, "</s>" in a prompt is four characters.

    Args:
        temperature: logits are divided by it before a token is drawn; 0 takes the most likely token.

    Raises UsageError for a prompt that has no token, or tokens that the model does not know.
    """
    from transformers import TextStreamer

    end = tokenizer.eos_token_id  # None: this tokenizer ends no document
    ids = tokenizer.encode(prompt, add_special_tokens=False, split_special_tokens=True)
    ids = [*([] if end is None else [end]), *ids]
    if not ids:
        raise UsageError("the tokenizer has no token between documents to begin with: give a --prompt")
    if max(ids) >= model.config.vocab_size:
        raise UsageError(f"the tokenizer is not the model's: token {max(ids)} is none of {model.config.vocab_size}")
    ids = torch.tensor([ids], device=model.device)
    torch.manual_seed(seed)
    chosen = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        pad_token_id=end,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        **chosen,
    )
    return tokenizer.decode(out[0], skip_special_tokens=True)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Let the model write that the command line names."""
    parser = OneLineParser(prog="python -m common.generate", description=summary(__doc__))
    parser.add_argument("source", help="run folder (its newest checkpoint), checkpoint, or Hugging Face folder")
    parser.add_argument("--prompt", type="text", default="", help="what the text begins with (default: nothing)")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to add at most (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another text (default: 0)")
    parser.add_argument("--tokenizer", help="Hugging Face name or path (default: the run's)")
    arguments = parser.parse_args(argv)
    if arguments.tokens < 1 or not (arguments.temperature == 0 or 1e-3 <= arguments.temperature < math.inf):
        raise UsageError("--tokens is at least 1, and --temperature 0 or a number from 0.001 on")
    if not 0 <= arguments.seed < 1 << 63:
        raise UsageError("--seed is a number from 0 to 2^63 - 1")
    try:
        arguments.prompt.encode()
    except UnicodeError:  # the shell gave bytes that are no UTF-8
        raise UsageError("--prompt is not text: its bytes are not UTF-8") from None
    try:
        model, tokenizer = opened(arguments.source, arguments.tokenizer)
    except (OSError, ValueError) as error:
        raise UsageError(first_line(error)) from error
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    write(model, tokenizer, arguments.prompt, arguments.tokens, arguments.temperature, arguments.seed)


if __name__ == "__main__":
    raise SystemExit(main())
