"""One Config from the variables of the environment and from flags, and the environment that hands it to a child."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.protocol.config import FIELDS, PREFIX, SECRETS, Config, ConfigError
from octavo.protocol.settings.foreign import foreign_keys, is_platforms
from octavo.protocol.settings.suggestions import setting_suggestion
from octavo.protocol.settings.values import explain_value, parse_value

# Other servers' names for our values.
SYNONYMS: dict[tuple[str, object], str] = {
    ("generation_config", "vllm"): "octavo",
    ("dtype", "half"): "float16",
    ("dtype", "float"): "float32",
}


def load_config(environ: Mapping[str, str], overrides: Mapping[str, object] | None = None) -> Config:
    """Return the Config of the OCTAVO_* variables in `environ`; `overrides` (by field name) win.

    Texts are read by the field's type (`parse_value`). A variable by which a platform describes a service is ignored.
    Raises ConfigError for an unknown variable or field and for a value that the field cannot take.
    """
    values: dict[str, object] = {}
    for key, text in environ.items():
        if key.startswith(PREFIX) and not is_platforms(key, text):
            values[_field_of(key)] = text
    for name, value in (overrides or {}).items():
        if name not in FIELDS:
            raise ConfigError(f"unknown setting {name}{setting_suggestion(name, FIELDS)}")
        values[name] = value
    converted: dict[str, Any] = {name: _convert(name, value) for name, value in values.items()}
    try:
        return Config(**converted)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def refuse_foreign_keys(config: Config, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if keys are set only where another server reads them: this server would be open to all."""
    if not config.api_key and (names := foreign_keys(environ)):
        raise ConfigError(
            f"{', '.join(names)} has no effect here, so that the server would be open to everybody: set OCTAVO_API_KEY"
            " (or --api-key) instead, or unset it to serve without keys"
        )


def child_environ(config: Config, environ: Mapping[str, str], *, secrets: bool) -> dict[str, str]:
    """Return the environment in which a child process loads the same Config; keys only if `secrets`."""
    kept = {key: value for key, value in environ.items() if not key.startswith(PREFIX)}
    for name, value in msgspec.structs.asdict(config).items():
        if value != FIELDS[name].default and (secrets or name not in SECRETS):
            kept[PREFIX + name.upper()] = json.dumps(value) if isinstance(value, tuple) else str(value)
    return kept


def _field_of(variable: str) -> str:
    """Return the name of the field that OCTAVO_<NAME> sets. Raises ConfigError."""
    known = {PREFIX + name.upper(): name for name in FIELDS}
    if variable not in known:
        raise ConfigError(f"unknown variable {variable}{setting_suggestion(variable, known)}")
    return known[variable]


def _convert(name: str, value: object) -> object:
    kind = FIELDS[name].type
    if isinstance(value, str):
        value = SYNONYMS.get((name, value), value)
    try:
        value = parse_value(kind, value)
        return msgspec.convert(value, kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        shown = "used" if name in SECRETS else repr(value)
        raise ConfigError(f"{name} cannot be {shown}: {explain_value(kind, value, error)}") from None
