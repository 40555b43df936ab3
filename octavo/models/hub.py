"""A model from a Hugging Face hub, through huggingface_hub, whose variables (HF_ENDPOINT, HF_TOKEN, ...) rule."""

import os
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from octavo.deadline import within
from octavo.errors import ModelError
from octavo.models.cache import require_space

SETTINGS = (
    *("config.json", "generation_config.json", "chat_template.json", "chat_template.jinja"),
    "additional_chat_templates/*.jinja",  # named ones
)
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken")
SENTENCEPIECE = ("spiece.model", "sentencepiece*.model")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
TORCH_WEIGHTS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")  # if a model has no other files of weights
CODE = ("*.py",)
# Folders hold other formats or the original release, except additional_chat_templates. Patterns have no exceptions. So
# a path in a folder is ignored unless it begins and ends with an "a": of all wanted files, only the *.jinja files of
# that folder do.
# Mistral's consolidated files are the weights once more.
IGNORED = ("[!a]*/*", "*/*[!a]", "*/*/*", "consolidated*")
DEFAULT_ENDPOINT = "https://huggingface.co"
# For the first answer, with name resolution and retries. A hub that does not answer by then counts as out of reach.
REACH_S = 6.0


def download_snapshot(model: str, *, with_code: bool, with_weights: bool) -> Path:
    """Return the hub's directory of `model` in huggingface_hub's cache, with only the files that serving needs.

    Without a network, cached files are used. Raises ModelError.
    """
    directory = _download(model, wanted_patterns(with_code=with_code, with_weights=with_weights))
    if not with_weights or has_weights(directory):
        return directory
    return _download(model, [*wanted_patterns(with_code=with_code, with_weights=False), *TORCH_WEIGHTS])


def has_weights(directory: Path) -> bool:
    """Return whether there are safetensors. If not, the hub may have files that torch wrote."""
    return any(directory.glob("*.safetensors"))


def wanted_patterns(*, with_code: bool, with_weights: bool) -> list[str]:
    """Return the names of the files that serving needs, as patterns."""
    patterns = [*SETTINGS, *TOKENIZER, *SENTENCEPIECE]
    return [*patterns, *(WEIGHTS if with_weights else ()), *(CODE if with_code else ())]


def download_settings(model: str, *, with_code: bool) -> Path:
    """Return a directory with the config.json of `model` and no more than other small files. Raises ModelError."""
    return _download(model, [*SETTINGS, *(CODE if with_code else ())])


def _download(model: str, patterns: list[str]) -> Path:
    _check_endpoint()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    failures = (HFValidationError, OSError, HTTPError)
    out_of_reach: Exception | None = None
    try:
        _require_space(model, within(REACH_S, lambda: _announced(model)), patterns)
    except failures as error:
        out_of_reach = error
    local_only = out_of_reach is not None
    try:
        download = partial(snapshot_download, allow_patterns=patterns, ignore_patterns=list(IGNORED))
        found = within(None, lambda: download(model, local_files_only=local_only))
    except failures as error:
        raise ModelError(_explain(model, out_of_reach or error)) from error
    return Path(found)


def _check_endpoint() -> None:
    """Raise ModelError for a malformed address: with some of them huggingface_hub cannot be imported."""
    endpoint = os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT)
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ModelError(
            f"HF_ENDPOINT is {endpoint!r}, which is no address of a hub: set it to one such as {DEFAULT_ENDPOINT}, or "
            "give a local path as MODEL."
        )


def _announced(model: str) -> Any:
    """Return what the hub says about `model`, with the sizes of its files."""
    from huggingface_hub import HfApi

    return HfApi().model_info(model, files_metadata=True, timeout=REACH_S)


def _require_space(model: str, announced: Any, patterns: list[str]) -> None:
    """Raise ModelError unless the disk has room for the files that are not in the cache yet."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.utils import filter_repo_objects

    wanted = filter_repo_objects(
        announced.siblings or [],
        allow_patterns=patterns,
        ignore_patterns=list(IGNORED),
        key=lambda file: file.rfilename,
    )
    absent = [file for file in wanted if not isinstance(try_to_load_from_cache(model, file.rfilename), str)]
    require_space(
        Path(constants.HF_HUB_CACHE), sum(file.size or 0 for file in absent), f"downloading {model}", "HF_HOME"
    )


def _explain(model: str, error: Exception) -> str:
    """Return one paragraph: why `model` did not come from the hub, and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    hub = constants.ENDPOINT
    match error:
        case HFValidationError():
            return f"{model!r} is neither a file or directory here nor a Hugging Face id (org/name): {error}"
        case GatedRepoError():
            return (
                f"{model} is gated: its owner must grant you access. Ask for it at {hub}/{model}, then set HF_TOKEN to "
                "a token of your account, or give a local path."
            )
        case RepositoryNotFoundError():
            return (
                f"{hub} has no model {model!r}, or it is private; there is no such directory here either. Check the "
                "spelling, set HF_TOKEN if it is private, HF_ENDPOINT if it is on another hub, or give a local path."
            )
        case LocalEntryNotFoundError() | OfflineModeIsEnabled() if constants.HF_HUB_OFFLINE:
            return (
                f"{model} is not (or not wholly) in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids the "
                "download. Unset HF_HUB_OFFLINE (HF_ENDPOINT chooses the hub), or give a local path."
            )
        case OSError(errno=int()):
            return (
                f"{model} cannot be written to the cache {constants.HF_HUB_CACHE}: {error.strerror} "
                f"({error.filename}). Make it writable, free some space, set HF_HOME to another directory, or give a "
                "local path."
            )
        case _:
            cause = str(error.__cause__ or error).strip().splitlines()
            return (
                f"{model} could not be fetched from {hub} ({cause[0] if cause else type(error).__name__}), and it is "
                f"not wholly in the cache {constants.HF_HUB_CACHE}. Check the spelling and the network, set "
                "HF_ENDPOINT to a hub that can be reached, or give a local path."
            )
