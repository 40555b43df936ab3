"""The settings of `LLM` and `AsyncLLM`: fields of Config as keywords, which win over a server's variables."""

import inspect
import os
from collections.abc import Mapping
from typing import TypeVar

from octavo.protocol.config import FIELDS, Config, ConfigError
from octavo.protocol.process import know_home
from octavo.protocol.settings.flags import describe
from octavo.protocol.settings.foreign import say_what_has_no_effect
from octavo.protocol.settings.loading import load_config, refuse_foreign_keys
from octavo.protocol.settings.suggestions import setting_suggestion

# The launcher of the processes chooses these: each server has its own sockets, and its own place where ranks meet.
LAUNCHER_FIELDS = (
    "frontend_address",
    "backend_address",
    "schedulers",
    "rank",
    "distributed_address",
    "link_keys_dir",
    "insecure_links",
)
# A program's own engine serves HTTP only if one of these is a keyword.
HTTP_FIELDS = (
    "host",
    "port",
    "uds",
    "metrics_port",
    "api_key",
    "allowed_origins",
    "root_path",
    "keep_alive_timeout_s",
    "shutdown_timeout_s",
)
LOG_LEVEL = "warning"  # the default: the program's own output is more important
KEYWORDS = tuple(name for name in FIELDS if name not in LAUNCHER_FIELDS)

AnyClass = TypeVar("AnyClass", bound=type)


def config_of(caller: str, model: "str | os.PathLike[str] | None", settings: Mapping[str, object]) -> Config:
    """Return the Config of the OCTAVO_* variables, `model` and `settings`, which win; None leaves a setting unchanged.

    Raises TypeError for an unknown keyword, with the nearest known one, and ConfigError for a wrong value.
    """
    know_home()
    for name in settings:
        if name not in KEYWORDS:
            raise TypeError(f"{caller} got an unexpected keyword argument {name!r}{_why(caller, name)}")
    given: dict[str, object] = {"log_level": os.environ.get("OCTAVO_LOG_LEVEL", LOG_LEVEL)}
    given |= {name: value for name, value in settings.items() if value is not None}
    if model is not None:
        given["model"] = os.fspath(model)
    config = load_config(os.environ, given)
    refuse_launcher_fields(config, caller)
    if wants_http(settings):
        refuse_foreign_keys(config, os.environ)
    say_what_has_no_effect(os.environ, FIELDS)
    return config


def wants_http(settings: Mapping[str, object]) -> bool:
    """Return whether a keyword asks for the HTTP API. Variables do not count: they are for servers."""
    return any(settings.get(name) is not None for name in HTTP_FIELDS)


def refuse_launcher_fields(config: Config, caller: str) -> None:
    """Raise ConfigError if a variable sets a field that `caller`, which starts the processes, chooses itself."""
    for name in LAUNCHER_FIELDS:
        if getattr(config, name) != FIELDS[name].default:
            variable = f"OCTAVO_{name.upper()}"
            raise ConfigError(f"{variable} is for processes started one by one; {caller} chooses its own")


def with_settings(kind: AnyClass) -> AnyClass:
    """Add the settings to the signature and the docstring of the class `kind`."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    names = [name for name in KEYWORDS if name != "model"]
    parameters = [
        inspect.Parameter(name, keyword, default=LOG_LEVEL if name == "log_level" else FIELDS[name].default)
        for name in names
    ]
    setattr(kind, "__signature__", inspect.Signature([model, *parameters]))  # noqa: B010  (it is no field of a type)
    listed = "\n".join(f"    {name}: {describe(name)}" for name in names).replace(
        describe("log_level"), f"least level to log (default: {LOG_LEVEL})"
    )
    kind.__doc__ = f"{inspect.cleandoc(kind.__doc__ or '')}\n\nSettings:\n{listed}"
    return kind


def _why(caller: str, name: str) -> str:
    if name in LAUNCHER_FIELDS:
        return f": {caller} chooses its own"
    return setting_suggestion(name, KEYWORDS)
