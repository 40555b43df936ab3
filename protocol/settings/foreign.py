"""Variables of the environment that look as if they were for this server, and are not.

Kubernetes and Docker describe a service in variables that begin with the service's name: they are ignored. Variables of
another server have no effect, and the log says so to users who come from there. A key among them is refused elsewhere:
this server would be open to everybody.
"""

import logging
import re
from collections.abc import Collection, Iterator, Mapping

from octavo.protocol.config import PREFIX
from octavo.protocol.settings.suggestions import suggestion

logger = logging.getLogger(__name__)

# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables: NAME_SERVICE_HOST,
# NAME_SERVICE_PORT, NAME_SERVICE_PORT_<name of a port>, and the NAME_PORT… variables of Docker's links.
PLATFORM_NAME = re.compile(r"SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?|(ENV|NAME)_\w+")
PLATFORM_ADDRESS = re.compile(r"(tcp|udp|sctp)://")  # the value of NAME_PORT

SERVERS = {
    "VLLM_": "vLLM",
    "SGLANG_": "SGLang",
    "SGL_": "SGLang",
    "LLAMA_": "llama.cpp",
    "OLLAMA_": "Ollama",
    "TGI_": "text-generation-inference",
}
# The variables that the hub's library reads, and other libraries with the same prefix.
HUB_NAMES = (
    *("HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "HF_ENDPOINT", "HF_INFERENCE_ENDPOINT", "HF_DEBUG", "HF_HUB_CACHE"),
    *("HF_ASSETS_CACHE", "HF_HUB_OFFLINE", "HF_HUB_VERBOSITY", "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"),
    *("HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_SYMLINKS", "HF_HUB_DISABLE_SYMLINKS_WARNING"),
    *("HF_HUB_DISABLE_EXPERIMENTAL_WARNING", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_IMPLICIT_TOKEN"),
    *("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_SHARED_BLOBS", "HF_HUB_DISABLE_UPDATE_CHECK", "HF_HUB_ENABLE_HF_TRANSFER"),
    *("HF_HUB_USER_AGENT_ORIGIN", "HF_XET_CACHE", "HF_XET_HIGH_PERFORMANCE", "HF_MODULES_CACHE", "HF_DATASETS_CACHE"),
    *("HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "HF_METRICS_CACHE", "HF_UPDATE_DOWNLOAD_COUNTS"),
)
MISSPELT = 0.8  # likeness, of 1, from which a name counts as a misspelt other name


def is_platforms(variable: str, value: str) -> bool:
    """Return whether a platform set this variable to describe one of its services. The name begins with PREFIX."""
    name = variable.removeprefix(PREFIX)
    if re.fullmatch(rf"(\w+_)?({PLATFORM_NAME.pattern})", name):
        return True
    return bool(re.fullmatch(r"(\w+_)?PORT", name) and PLATFORM_ADDRESS.match(value))


def foreign_keys(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that set the keys of other servers' clients."""
    return [name for name, value in environ.items() if value and _server(name) and name.endswith("API_KEY")]


def say_what_has_no_effect(environ: Mapping[str, str], settings: Collection[str]) -> None:
    """Log each variable that is not for this server; `settings` are the names of our own settings."""
    if platforms := [name for name, value in environ.items() if name.startswith(PREFIX) and is_platforms(name, value)]:
        logger.info("ignored, as a platform's description of a service: %s", ", ".join(sorted(platforms)))
    for line in _foreign(environ, settings):
        logger.warning("%s", line)


def _foreign(environ: Mapping[str, str], settings: Collection[str]) -> Iterator[str]:
    for name, value in environ.items():
        if value and (server := _server(name)):
            setting = name.split("_", 1)[1].removeprefix("ARG_")
            ours = f"; {PREFIX}{setting} has" if setting.lower() in settings else ""
            yield f"{name} is a variable of {server} and has no effect here{ours}"
        elif name.startswith("HF_") and name not in HUB_NAMES:
            meant = suggestion(name, HUB_NAMES, least_likeness=MISSPELT)
            yield from [f"{name} is a variable that nobody reads{meant}"] if meant else []


def _server(name: str) -> str | None:
    return next((server for prefix, server in SERVERS.items() if name.startswith(prefix)), None)
