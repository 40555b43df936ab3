"""A GGUF file as a Hugging Face directory: tokenizer, chat template, configuration, and its weights as they are."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.models.cache import require_space
from octavo.models.convert.config import model_config
from octavo.models.convert.index import build_index, computing_dtype
from octavo.models.convert.metadata import GGUFFile
from octavo.models.convert.tokenizer import build_tokenizer, end_ids, tokenizer_config
from octavo.models.convert.weights import plan_weights, write_safetensors
from octavo.models.json_files import write_object
from octavo.protocol.model_files.gguf_index import GGUF_FILE, GGUF_INDEX

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Counts up when the same GGUF file gives another directory.
CONVERSION = 4
# generation_config.json's names of what a file recommends
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def link_gguf(path: Path, directory: Path) -> None:
    """Make the new directory `directory`, in which the GGUF file `path` is linked, with an index of its tensors.

    The decisions come first: a file that cannot be served is refused before anything is written. Raises ModelError,
    which names what is unsupported or damaged.
    """
    file = GGUFFile(path)
    config = model_config(file) | {"dtype": computing_dtype(file), "quantization_config": {"quant_method": "gguf"}}
    tokenizer = build_tokenizer(file)
    index = build_index(file, plan_weights(file, config))

    directory.mkdir()
    _write_descriptions(file, config, tokenizer, directory)
    (directory / GGUF_INDEX).write_bytes(msgspec.json.encode(index))
    (directory / GGUF_FILE).symlink_to(path)


def convert_gguf(path: Path, directory: Path) -> None:
    """Convert the GGUF file `path` into the new directory `directory`, its weights to bf16 safetensors.

    Raises ModelError as `link_gguf` does, and if the disk has no room.
    """
    file = GGUFFile(path)
    config = model_config(file)
    tokenizer = build_tokenizer(file)
    weights = plan_weights(file, config)

    directory.mkdir()
    require_space(directory, sum(weight.num_bytes for weight in weights), f"converting {path.name}")
    _write_descriptions(file, config, tokenizer, directory)
    write_safetensors(directory / "model.safetensors", weights, title=f"Converting {path.name}")


def _write_descriptions(file: GGUFFile, config: dict[str, Any], tokenizer: "Tokenizer", directory: Path) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    write_object(directory / "tokenizer_config.json", tokenizer_config(file))
    write_object(directory / "config.json", config)
    write_object(directory / "generation_config.json", _generation_config(file, config))


def _generation_config(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """The ids that begin, end and pad, and the sampling that the file recommends."""
    names = ("bos_token_id", "pad_token_id")
    said: dict[str, Any] = {name: config[name] for name in names if name in config}
    if eos_token_ids := end_ids(file):
        said["eos_token_id"] = eos_token_ids[0] if len(eos_token_ids) == 1 else eos_token_ids
    recommended = {name: file.get(f"general.sampling.{key}", float | int) for name, key in SAMPLING.items()}
    return said | {name: value for name, value in recommended.items() if value is not None}
