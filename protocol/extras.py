"""The optional parts of the installation, and the sentence that tells a user which part is missing."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# By extra of pyproject.toml: the modules that our code imports. The sentence names the first absent one.
EXTRAS = {
    "gateway": (
        "gguf",
        "httptools",
        "httpx",
        "huggingface_hub",
        "jinja2",
        "llguidance",
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
        "llguidance",
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
    """A command needs packages that are not installed; the message says how to install them."""


def require_extras(what: str, *extras: str) -> None:
    """Raise MissingExtraError if a module that `what` needs of `extras` is absent. No module is imported here."""
    absent = {extra: _absent(extra) for extra in extras}
    if lacking := [extra for extra in extras if absent[extra]]:
        raise MissingExtraError(_sentence(what, absent[lacking[0]][0], lacking))


@contextmanager
def imports_of(process: str, extra: str) -> Iterator[None]:
    """If an import in the body fails for want of a module of `extra`, print one sentence and exit with status 2."""
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
