"""A model from ModelScope, through its package, whose variables (MODELSCOPE_CACHE, ...) rule."""

import os
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

from octavo.deadline import within
from octavo.errors import ModelError
from octavo.models.hub import IGNORED, REACH_S, TORCH_WEIGHTS, has_weights, wanted_patterns

# Its errors have one base today; older releases had several kinds.
ERRORS = ("HubError", "NotExistError", "RequestError", "FileDownloadError", "InvalidParameter", "FileIntegrityError")


def download_from_modelscope(model: str, *, with_code: bool, with_weights: bool) -> Path:
    """Return ModelScope's directory of `model` in its cache, with only the files that serving needs.

    Without a network, cached files are used. Raises ModelError.
    """
    snapshot_download, errors = _package()
    unreachable = _why_unreachable()
    download = partial(snapshot_download, ignore_patterns=list(IGNORED), local_files_only=bool(unreachable))

    def fetch(patterns: list[str]) -> Path:
        return Path(within(None, lambda: download(model, allow_patterns=patterns)))

    try:
        directory = fetch(wanted_patterns(with_code=with_code, with_weights=with_weights))
        if with_weights and not has_weights(directory):
            return fetch([*wanted_patterns(with_code=with_code, with_weights=False), *TORCH_WEIGHTS])
        return directory
    except errors as error:
        raise ModelError(_explain(model, unreachable or str(error))) from error


def _package() -> tuple[Any, tuple[type[Exception], ...]]:
    """Return the package's download function, and the errors that it raises."""
    try:
        from modelscope import snapshot_download
        from modelscope.hub import errors
    except ImportError as error:
        raise ModelError(
            f"use_modelscope is set, and the Python package `modelscope` cannot be imported ({error}): "
            "pip install modelscope, or leave out --use-modelscope (OCTAVO_USE_MODELSCOPE) to fetch from the"
            " Hugging Face hub."
        ) from error
    own = [getattr(errors, name) for name in ERRORS if hasattr(errors, name)]
    return snapshot_download, (OSError, ValueError, *own)


def _endpoint() -> str:
    domain = os.environ.get("MODELSCOPE_DOMAIN", "www.modelscope.cn")
    address = os.environ.get("MODELSCOPE_ENDPOINT") or domain
    return address if "://" in address else f"https://{address}"


def _why_unreachable() -> str:
    """Return why ModelScope does not answer, or "" if it answers. The package itself would try for minutes."""
    try:
        with within(REACH_S, lambda: urllib.request.urlopen(_endpoint(), timeout=REACH_S)):
            return ""
    except urllib.error.HTTPError:
        return ""  # an error status is an answer too
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def _explain(model: str, cause: str) -> str:
    lines = cause.strip().splitlines()
    return (
        f"{model} could not be fetched from ModelScope at {_endpoint()} ({lines[0] if lines else 'no reason given'}), "
        "and it is not wholly in its cache. Check the spelling and the network, set MODELSCOPE_ENDPOINT to a hub that "
        "can be reached, unset OCTAVO_USE_MODELSCOPE to fetch from the Hugging Face hub, or give a local path."
    )
