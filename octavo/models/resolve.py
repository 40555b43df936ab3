"""MODEL, as a person typed it, becomes a local Hugging Face directory before any process starts."""

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ModelError
from octavo.models.cache import build_once, models_directory
from octavo.models.checkpoint import require_checkpoint
from octavo.models.convert import CONVERSION, link_gguf
from octavo.models.convert.header import MAGIC
from octavo.models.demo import DEMO_NAME, demo_gguf, expanded_demo, present_demo_gguf, present_expanded_demo
from octavo.models.file_kinds import what_instead
from octavo.models.hub import download_settings, download_snapshot
from octavo.models.modelscope import download_from_modelscope
from octavo.models.tokenizer import with_tokenizer_json
from octavo.protocol.config import Config

logger = logging.getLogger(__name__)

ROUNDINGS = ("int8", "int4")  # values of Config.quantization that need plain weights


@dataclass(frozen=True)
class ResolvedModel:
    """A model on this machine. Clients call it `served_name` unless the settings name another."""

    directory: Path
    served_name: str


def resolve_model(
    model: str | None = None,
    *,
    trust_remote_code: bool = False,
    needs_weights: bool = True,
    use_modelscope: bool = False,
    expands_demo: bool = False,
) -> ResolvedModel:
    """Return the local directory of `model`; download and convert what is not there yet.

    `model` is a directory, a `.gguf` file, an id of the Hugging Face hub or, with `use_modelscope`, of ModelScope. None
    is the demo, and so is its name: its 4-bit GGUF file or, if `expands_demo`, the same weights in bfloat16. The
    directory has config.json, tokenizer.json and, unless `needs_weights` is False (`--load-format dummy`), safetensors
    or a linked GGUF file. Raises ModelError; its message says in one paragraph what is wrong and what to do.
    """
    if model is None or _names_demo(model):
        return ResolvedModel(expanded_demo() if expands_demo else _gguf_directory(demo_gguf()), DEMO_NAME)
    directory = _locate(model, trust_remote_code, needs_weights, use_modelscope)
    require_checkpoint(directory, model, trust_remote_code=trust_remote_code, needs_weights=needs_weights)
    return ResolvedModel(with_tokenizer_json(directory, model, trust_remote_code), model)


def resolve_model_of(config: Config) -> ResolvedModel:
    """Do what `resolve_model` does for the model that `config` names."""
    return resolve_model(
        config.model or None,
        trust_remote_code=config.trust_remote_code,
        needs_weights=config.load_format != "dummy",
        use_modelscope=config.use_modelscope,
        expands_demo=_expands_demo(config),
    )


def resolve_config(
    model: str | None = None,
    *,
    trust_remote_code: bool = False,
    use_modelscope: bool = False,
    expands_demo: bool = False,
) -> Path:
    """Return a local directory with the config.json of `model`; for an id only small files are fetched. A GGUF file is
    described, as for serving. The demo must be here already. Raises ModelError.
    """
    if model is None or _names_demo(model):
        return present_expanded_demo() if expands_demo else _gguf_directory(present_demo_gguf())
    path = _expanded(model)
    if path.is_file():
        return _gguf_directory(path)
    directory = _local_directory(model) or (
        download_from_modelscope(model, with_code=trust_remote_code, with_weights=False)
        if use_modelscope
        else download_settings(model, with_code=trust_remote_code)
    )
    require_checkpoint(directory, model, trust_remote_code=trust_remote_code, needs_weights=False)
    return directory


def resolve_config_of(config: Config) -> Path:
    """Do what `resolve_config` does for the model that `config` names."""
    return resolve_config(
        config.model or None,
        trust_remote_code=config.trust_remote_code,
        use_modelscope=config.use_modelscope,
        expands_demo=_expands_demo(config),
    )


def one_name(model: str) -> str:
    """Return one name for all ways to write the same `model`: the demo's name, a path from the root, or an id."""
    return DEMO_NAME if not model or _names_demo(model) else from_root(model)


def from_root(path: str) -> str:
    """Return `path` as a path from the root; a text that is no path here stays unchanged."""
    expanded = os.path.expanduser(path)
    return os.path.realpath(expanded) if os.path.exists(expanded) else path


def _names_demo(model: str) -> bool:
    """Return whether `model` is the demo's name, and no file or directory has this name."""
    return model == DEMO_NAME and not Path(model).exists()


def _expands_demo(config: Config) -> bool:
    """Return whether `config` names a type of the weights, or rounds plain weights: the demo's own weights have 4
    bits."""
    return config.dtype != "auto" or config.quantization in ROUNDINGS


def _locate(model: str, trust_remote_code: bool, needs_weights: bool, use_modelscope: bool) -> Path:
    path = _expanded(model)
    if path.is_file():
        return _gguf_directory(path)
    download = download_from_modelscope if use_modelscope else download_snapshot
    return _local_directory(model) or download(model, with_code=trust_remote_code, with_weights=needs_weights)


def _local_directory(model: str) -> Path | None:
    """Return the directory `model`, or None for a Hugging Face id. Raises ModelError if `model` is neither."""
    path = _expanded(model)
    if model and path.is_dir():
        return path.absolute()
    if not model or _looks_like_a_path(model):
        raise ModelError(
            f"there is no file or directory {model!r}. MODEL is a directory with config.json, a .gguf file, a Hugging "
            "Face id such as org/name, or absent for the demo."
        )
    return None


def _expanded(model: str) -> Path:
    """Return `model` as a path; ~NAME of an unknown user stays as typed."""
    return Path(os.path.expanduser(model))


def _looks_like_a_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.endswith((".gguf", "/")) or model.count("/") > 1


def _gguf_directory(path: Path) -> Path:
    """The directory through which the file `path` is read, made once for each state of the file."""
    _require_gguf(path)
    source = path.resolve()
    status = source.stat()
    state = f"{source}\0{status.st_size}\0{status.st_mtime_ns}\0{CONVERSION}"
    target = models_directory() / f"{path.stem}-{hashlib.sha256(state.encode()).hexdigest()[:12]}"
    return build_once(target, lambda partial: _describe_gguf(source, partial))


def _require_gguf(path: Path) -> None:
    """Raise ModelError unless the file begins like a GGUF file; the message says what the file is instead."""
    try:
        instead = what_instead(path) if path.suffix == ".gguf" else ""
        with path.open("rb") as file:
            begins_as_one = file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}. Make it readable for this user.") from None
    if instead:
        raise ModelError(f"{path} {instead}.")
    if not begins_as_one:
        raise ModelError(f"{path} is a file, but not a GGUF file. To serve safetensors, give the directory it is in.")


def _describe_gguf(source: Path, partial: Path) -> None:
    logger.info("reading the header of %s: some seconds, once", source.name)
    link_gguf(source, partial)
