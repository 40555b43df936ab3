"""What a model's directory must have before anything is started on it."""

from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.models.file_kinds import what_instead
from octavo.models.json_files import read_object
from octavo.models.older import is_older
from octavo.models.safetensors_file import damage
from octavo.protocol.model_files.gguf_index import GGUF_FILE, GGUF_INDEX
from octavo.protocol.model_files.torch_archive import damage as torch_damage
from octavo.protocol.model_files.weight_files import BIN_FILE, BIN_INDEX_FILE, INDEX_FILE, SINGLE_FILE, weight_files

INDEX_FILES = (INDEX_FILE, BIN_INDEX_FILE)
NAMES = (SINGLE_FILE, INDEX_FILE, BIN_FILE, BIN_INDEX_FILE)


def require_checkpoint(directory: Path, model: str, *, trust_remote_code: bool, needs_weights: bool) -> None:
    """Raise a ModelError that names what `directory` lacks, or what it needs permission for."""
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise ModelError(
            f"{model} has no config.json, so {directory} is not a model in Hugging Face's format."
            + _other_formats(directory)
        )
    config = read_object(config_path)
    if "auto_map" in config and not (trust_remote_code or is_older(config) or _in_transformers(config)):
        raise ModelError(
            f"{model} (model_type {config.get('model_type')!r}) runs with Python code from its own repository, which "
            "is not executed unless you allow it. Read that code, then pass --trust-remote-code."
        )
    if needs_weights:
        _require_weights(directory, model)


def _require_weights(directory: Path, model: str) -> None:
    try:
        names, said_by, _ = weight_files(directory)
    except ValueError as error:
        raise ModelError(f"{error}. Download the model again.") from None
    absent = [name for name in names if not (directory / name).is_file()]
    if said_by in INDEX_FILES and (absent or not names):
        raise ModelError(
            f"{model} is incomplete: {directory} lacks {', '.join(absent[:3]) or 'every weight'} of {said_by} "
            f"({len(absent)} of {len(names)} files). Download it again."
        )
    if not absent:
        _require_whole([directory / name for name in names])
    elif (directory / GGUF_INDEX).is_file():
        if not (directory / GGUF_FILE).is_file():
            moved = (directory / GGUF_FILE).readlink() if (directory / GGUF_FILE).is_symlink() else GGUF_FILE
            raise ModelError(f"{model} is read from {moved}, which is not there any more. Give the file as MODEL.")
    else:
        raise ModelError(
            f"{model} has no weights that can be read: {directory} has none of {', '.join(NAMES)}."
            + _other_formats(directory)
        )


def _require_whole(paths: list[Path]) -> None:
    for path in paths:
        try:
            found = what_instead(path) or (torch_damage(path) if path.suffix == ".bin" else damage(path))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}. Make it readable for this user.") from None
        if found:
            # The hub's cache links to its own files. It does not fetch a file that it has.
            kept = f" (remove {path.resolve()} first)" if path.is_symlink() else ""
            raise ModelError(f"{path} {found}{kept}.")


def _other_formats(directory: Path) -> str:
    """Return a sentence that says what to do with the files that are there instead."""
    if gguf := sorted(directory.glob("*.gguf")):
        return f" It has GGUF files: give one of them as MODEL, for instance {gguf[0]}."
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")) or any(directory.glob("*.pt")):
        return (
            " Its other files are pickles, which are not loaded: save the model as safetensors (save_pretrained does)."
        )
    return " Give a directory that save_pretrained made, a .gguf file or a Hugging Face id."


def _in_transformers(config: dict[str, Any]) -> bool:
    """Whether the architecture runs without its repository's code."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return config.get("model_type") in CONFIG_MAPPING_NAMES
