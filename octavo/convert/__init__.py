"""A GGUF file as a Hugging Face directory: bf16 weights, tokenizer, chat template, configuration."""

from pathlib import Path
from typing import Any

from octavo.cache import require_space
from octavo.convert.config import model_config
from octavo.convert.metadata import GGUFFile
from octavo.convert.tokenizer import build_tokenizer, tokenizer_config
from octavo.convert.weights import plan_weights, write_safetensors
from octavo.json_files import write_object


def convert_gguf(path: Path, directory: Path) -> None:
    """Convert the GGUF file `path` into the new directory `directory`.

    The decisions come first, so that what cannot be converted is refused before anything is written.
    Raises ModelError, which names what is unsupported, damaged or too large for the disk.
    """
    file = GGUFFile(path)
    config = model_config(file)
    tokenizer = build_tokenizer(file)
    weights = plan_weights(file, config)

    directory.mkdir()
    require_space(directory, sum(weight.num_bytes for weight in weights), f"converting {path.name}")
    tokenizer.save(str(directory / "tokenizer.json"))
    write_object(directory / "tokenizer_config.json", tokenizer_config(file))
    write_object(directory / "config.json", config)
    write_object(directory / "generation_config.json", _generation_config(file, config))
    write_safetensors(directory / "model.safetensors", weights, title=f"Converting {path.name}")


def _generation_config(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """The ids that begin, end and pad. A GGUF file states no sampling defaults, so none are written."""
    names = ("bos_token_id", "pad_token_id")
    ends = [file.token_id(name) for name in ("eos", "eot", "eom")]
    eos_token_ids = sorted({token_id for token_id in ends if token_id is not None})
    ids: dict[str, Any] = {name: config[name] for name in names if name in config}
    if eos_token_ids:
        ids["eos_token_id"] = eos_token_ids[0] if len(eos_token_ids) == 1 else eos_token_ids
    return ids
