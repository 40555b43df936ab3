"""A model that comes without tokenizer.json gets one: a directory in the cache with the rest linked."""

import hashlib
from pathlib import Path

from octavo.errors import ModelError
from octavo.models.cache import build_once, models_directory
from octavo.models.json_files import read_object
from octavo.models.older import is_older, write_tokenizer

SOURCES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
)
LONGEST_CAUSE = 160  # characters


def with_tokenizer_json(directory: Path, model: str, trust_remote_code: bool) -> Path:
    """Return `directory` if it has tokenizer.json. Otherwise return a directory in the cache with a tokenizer.json
    that transformers converted. `older` builds the tokenizers of older models, which came as code. Raises ModelError
    if there is no tokenizer, or if it cannot be converted.
    """
    if (directory / "tokenizer.json").is_file():
        return directory
    sources = sorted({path for pattern in SOURCES for path in directory.glob(pattern)})
    # A tokenizer that is code may keep its vocabulary in any file.
    is_code = trust_remote_code and "auto_map" in read_object(directory / "tokenizer_config.json")
    if not (sources or is_code or is_older(read_object(directory / "config.json"))):
        raise ModelError(
            f"{model} has no tokenizer: {directory} has neither tokenizer.json nor files to make one from. Copy "
            "tokenizer.json and tokenizer_config.json from the model that it was trained from."
        )
    target = models_directory() / f"{directory.name}-{_key(directory)}"
    return build_once(target, lambda partial: _convert(directory, partial, model, trust_remote_code))


def _convert(directory: Path, partial: Path, model: str, trust_remote_code: bool) -> None:
    partial.mkdir()
    if is_older(read_object(directory / "config.json")):
        write_tokenizer(directory, partial, model)
    else:
        _convert_by_transformers(directory, partial, model, trust_remote_code)
    for path in directory.iterdir():
        if not (partial / path.name).exists():
            (partial / path.name).symlink_to(path.absolute())


def _convert_by_transformers(directory: Path, partial: Path, model: str, trust_remote_code: bool) -> None:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code).save_pretrained(partial)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(_refusal(model, _first_sentence(str(error)))) from error
    if not (partial / "tokenizer.json").is_file():
        raise ModelError(_refusal(model, "it exists as Python code only"))


def _refusal(model: str, cause: str) -> str:
    return (
        f"{model} has no tokenizer.json, and its tokenizer cannot be converted ({cause}). Put a tokenizer.json beside "
        "its config.json: that of the model it was trained from, or one saved by save_pretrained."
    )


def _first_sentence(text: str) -> str:
    """Return the beginning of a message of transformers, which can have many lines."""
    words = " ".join(text.split()).split(". ")[0].rstrip(".:")
    return words if len(words) <= LONGEST_CAUSE else f"{words[:LONGEST_CAUSE]}..."


def _key(directory: Path) -> str:
    """A name for the state of the directory: every file's name, size and time of change."""
    files = [(path.name, path.stat()) for path in sorted(directory.iterdir()) if path.exists()]  # no dangling links
    state = [str(directory.resolve()), *(f"{name}\0{s.st_size}\0{s.st_mtime_ns}" for name, s in files)]
    return hashlib.sha256("\0".join(state).encode()).hexdigest()[:12]
