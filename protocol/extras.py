"""The optional parts of the installation, and the one sentence that a person reads where one is missing."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# The modules that our code imports of each of pyproject.toml's extras; the first that is absent is named.
EXTRAS = {
    "gateway": (
        "gguf",
        "httptools",
        "httpx",
        "huggingface_hub",
        "jinja2",
        "numpy",
        "prometheus_client",
        "starlette",
        "tokenizers",
        "tqdm",
        "transformers",
        "uvicorn",
        "uvloop",
    ),
    "executor": (
        "torch",
        "huggingface_hub",
        "llvmlite",
        "numba",
        "numpy",
        "safetensors",
        "tqdm",
        "transformers",
    ),
    "bench": (
        "aiohttp",
        "matplotlib",
        "numpy",
        "psutil",
        "tqdm",
    ),
}


class MissingExtraError(ImportError):
    """What was asked for needs packages that are not installed; the message has the command that installs them."""


def require_extras(what: str, *extras: str) -> None:
    """Raise MissingExtraError unless `what` can import all modules of `extras`. None is imported here."""
    absent = {extra: _absent(extra) for extra in extras}
    if lacking := [extra for extra in extras if absent[extra]]:
        raise MissingExtraError(_sentence(what, absent[lacking[0]][0], lacking))


@contextmanager
def imports_of(process: str, extra: str) -> Iterator[None]:
    """End the process with status 2 and one sentence if an import in the body lacks a module of `extra`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS[extra]:
            raise
        print(f"{process}: {_sentence('it', _absent(extra)[0], [extra])}", file=sys.stderr)
        sys.exit(2)


def _absent(extra: str) -> list[str]:
    return [module for module in EXTRAS[extra] if importlib.util.find_spec(module) is None]


def _sentence(what: str, module: str, extras: list[str]) -> str:
    return (
        f"{what} needs {module}, which is not installed here. In Octavo's checkout (or with its wheel in place of the "
        f'dot) this installs it and whatever else is needed: pip install ".[{",".join(extras)}]"'
    )
