"""The weights that a run starts with: random ones, or those of --init-from in Hugging Face's format (safetensors)."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from common.checkpoints import boxes
from common.checkpoints.boxes import SavedBox
from common.config import TrainConfig
from common.errors import UsageError
from common.model_config import ModelConfig
from common.presets import hub_errors_in_one_line, weights_folder
from common.weights.huggingface import as_stored, check_config, huggingface_name, is_optional, weight_shapes
from common.weights.initialisation import InitialValues, random_values

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # others are quantised
ROWS = 256  # of the embedding, at equal distances, that a tied head is compared with


def initial_values(config: TrainConfig) -> InitialValues:
    """The function that fills a run's parameters: with the weights of --init-from, else with random numbers."""
    if config.init_from is not None:
        return stored_values(config.init_from, config.model_config)
    return random_values(config.seed)


def stored_values(name_or_path: str, config: ModelConfig) -> InitialValues:
    """Return a function that fills tensors with the weights in a folder or on the Hub, converted to their types.

    It reads only the boxes that the tensors' specs describe. Rows that pad the vocabulary become zero. Raises
    UsageError when there is no checkpoint, when it is damaged or quantised or belongs to another model than `config`,
    when it lacks a weight, has an unknown one or one of another shape, and when it holds a head of its own, though its
    configuration says that the head is the embedding.
    """
    folder = str(weights_folder(name_or_path))
    with hub_errors_in_one_line(f"--init-from {name_or_path}"):
        reader = _reader(folder)
        stored = reader.read_metadata().state_dict_metadata
        if not stored:
            raise FileNotFoundError("it holds no .safetensors files")
    check_config("--init-from", folder, config)
    _check_weights(folder, stored, config)
    if config.tie_embeddings and "lm_head.weight" in stored:
        _check_tie(folder, reader, config)

    def fill(tensors: Iterable[torch.Tensor]) -> None:
        wanted: list[SavedBox] = []
        for tensor in tensors:
            wanted += as_stored(tensor.spec, tensor.detach().zero_(), config)
        boxes.read(reader, wanted)

    return fill


def _reader(folder: str):
    """DCP's reader of the weights in a folder, without the files that do not count."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint.filesystem import FileSystem

    class Chosen(FileSystem):
        def ls(self, path):
            return [str(file) for file in weight_files(Path(path))]

    reader = HuggingFaceStorageReader(folder)
    reader.fs = Chosen()
    return reader


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights in a folder, as transformers takes them: model.safetensors, or what an index names.

    There may be others, which are not read: the same weights in another format (Mistral's consolidated.safetensors), or
    older ones. All files are taken if there is neither. Raises UsageError if there are both.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not index.is_file():
        return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    names = {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    if single.is_file() and single not in names:
        told = f"it holds {single.name} and {index.name}, which names other files"
        raise UsageError(f"--init-from {folder}: {told}; one of them is of another save, and has to go")
    return sorted(names)


def _check_weights(folder: str, stored: dict, config: ModelConfig) -> None:
    """Raise UsageError unless `stored` describes the whole model's weights; so all ranks refuse the same."""
    shapes = weight_shapes(config)
    for name in sorted(each for each in shapes.keys() | stored.keys() if not is_optional(each, stored, config)):
        expected, found = shapes.get(name), tuple(stored[name].size) if name in stored else None
        if expected != found:
            raise UsageError(f"--init-from {folder}: the shape of {name} is {found}, that of --model is {expected}")
        if expected and stored[name].properties.dtype not in DTYPES:
            raise UsageError(f"--init-from {folder}: {name} is quantised ({stored[name].properties.dtype})")


def _check_tie(folder: str, reader, config: ModelConfig) -> None:
    """Raise UsageError unless the head that `reader` finds is the embedding. Training changes all of a head's rows, so
    a few of them tell two heads apart; all of a large one on every rank would take minutes.
    """
    step = max(1, config.vocab // ROWS)
    rows = range(0, config.vocab, step)
    embedding, head = torch.empty(2, len(rows), config.hidden)
    wanted = [
        SavedBox(name, (config.vocab, config.hidden), ((row, row + 1), (0, config.hidden)), part[index : index + 1])
        for name, part in ((huggingface_name("embedding.weight"), embedding), ("lm_head.weight", head))
        for index, row in enumerate(rows)
    ]
    boxes.read(reader, wanted)
    if not torch.equal(embedding, head):
        told = "though its config.json says so: set tie_word_embeddings to false there"
        raise UsageError(f"--init-from {folder}: lm_head.weight is not the embedding, {told}")
