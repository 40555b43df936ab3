"""A model from a Hugging Face hub, through huggingface_hub, whose variables (HF_ENDPOINT, HF_TOKEN, ...) rule."""

from pathlib import Path

from octavo.errors import ModelError

SETTINGS = ("config.json", "generation_config.json", "chat_template*")
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken")
SENTENCEPIECE = ("spiece.model", "sentencepiece*.model")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
CODE = ("*.py",)
# Folders hold other formats or the original release; Mistral's consolidated files are the weights once more.
IGNORED = ("*/*", "consolidated*")


def download_snapshot(model: str, *, with_code: bool, with_weights: bool) -> Path:
    """Return the hub's directory of `model` in huggingface_hub's cache, with only the files that serving needs.

    Without a network, what is cached is used. Raises ModelError.
    """
    patterns = [*SETTINGS, *TOKENIZER, *SENTENCEPIECE]
    patterns += WEIGHTS if with_weights else ()
    return _download(model, [*patterns, *(CODE if with_code else ())])


def download_settings(model: str, *, with_code: bool) -> Path:
    """Return a directory with the config.json of `model` and no more than other small files. Raises ModelError."""
    return _download(model, [*SETTINGS, *(CODE if with_code else ())])


def _download(model: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        return Path(snapshot_download(model, allow_patterns=patterns, ignore_patterns=list(IGNORED)))
    except (HFValidationError, OSError, HTTPError) as error:
        raise ModelError(_explain(model, error)) from error


def _explain(model: str, error: Exception) -> str:
    """One paragraph: why `model` did not come from the hub, and what to do about it."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
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
        case LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return (
                f"{model} is not (or not wholly) in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids the "
                "download. Unset HF_HUB_OFFLINE (HF_ENDPOINT chooses the hub), or give a local path."
            )
        case _:
            cause = str(error.__cause__ or error).strip().splitlines()
            return (
                f"{model} could not be fetched from {hub} ({cause[0] if cause else type(error).__name__}), and it is "
                f"not wholly in the cache {constants.HF_HUB_CACHE}. Check the network and the space on the disk, set "
                "HF_ENDPOINT to a hub that can be reached, or give a local path."
            )
