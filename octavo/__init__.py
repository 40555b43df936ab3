"""The Python API, the command line, and the modules that turn a model's name into local files."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.protocol.extras import require_extras
from octavo.protocol.version import __version__

if TYPE_CHECKING:
    from octavo.python.async_llm import AsyncLLM
    from octavo.python.llm import LLM
    from octavo.python.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.python.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

MODULES = {
    "LLM": "octavo.python.llm",
    "AsyncLLM": "octavo.python.async_llm",
    "CompletionOutput": "octavo.python.outputs",
    "Logprob": "octavo.python.outputs",
    "RequestOutput": "octavo.python.outputs",
    "SamplingParams": "octavo.python.sampling_params",
    "StructuredOutputsParams": "octavo.python.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import a name of the Python API when it is used first: the command line does not need it."""
    if name not in MODULES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    require_extras(f"octavo.{name}", "gateway", *(("executor",) if name in ("LLM", "AsyncLLM") else ()))
    return getattr(import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *MODULES]
