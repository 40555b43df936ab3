"""Reads the files of a model that a gateway needs, once at the start."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.gateway.text.chat_template import ChatTemplate
from octavo.gateway.text.end_of_turn import end_of_turn
from octavo.gateway.text.generation_config import FILE, SamplingDefaults, chosen_defaults, own_defaults, said_in_config
from octavo.gateway.text.tokenizer import Tokenizer
from octavo.protocol.config import Config
from octavo.protocol.model_files.bounded import read_bounded

logger = logging.getLogger(__name__)

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The parts of a model that a gateway needs."""

    directory: Path
    created_s: int  # Unix time of the model's files, the same on every replica that shares them
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    eos_token_ids: tuple[int, ...]
    max_position_tokens: int | None
    sampling_defaults: SamplingDefaults
    max_logprobs: int  # the most that a request may ask for


def read_model_files(config: Config) -> ModelFiles:
    """Read the files in `config.model`, a directory, and the defaults that `config.generation_config` chooses.

    Raises ValueError, which names the file, if a needed file is missing or malformed.
    """
    directory = Path(config.model)
    if not directory.is_dir():
        raise ValueError(f"the model {config.model!r} is not a directory")
    model = _read_json(directory / "config.json", required=True)
    text_model = model.get("text_config") or model
    if not isinstance(text_model, dict):
        raise ValueError(f"{directory / 'config.json'}: text_config is not a JSON object. Download the model again")
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    own_generation = _read_json(directory / FILE)
    own_path, own_said = (
        (directory / FILE, own_generation)
        if (directory / FILE).is_file()
        else (directory / "config.json", said_in_config(model, text_model))
    )
    special_tokens = _special_tokens(directory, tokenizer_config)
    tokenizer = Tokenizer(directory)
    named = _named_templates(directory, tokenizer_config)
    if others := sorted(named.keys() - {"default"}):
        logger.info("chat templates besides the default, for --chat-template: %s", ", ".join(others))
    chat_template = (
        _given_template(config.chat_template, named, special_tokens, tokenizer)
        if config.chat_template
        else _usable_template(directory, named, special_tokens, tokenizer)
    )
    eos_token_ids = _eos_token_ids(tokenizer, special_tokens, own_generation, model, text_model)
    _warn_of_no_end(directory, chat_template, eos_token_ids, tokenizer)
    return ModelFiles(
        directory=directory,
        created_s=int((directory / "config.json").stat().st_mtime),
        tokenizer=tokenizer,
        chat_template=chat_template,
        eos_token_ids=eos_token_ids,
        max_position_tokens=_positive_int(text_model, "max_position_embeddings", directory / "config.json"),
        sampling_defaults=_sampling_defaults(config.generation_config, own_path, own_said),
        max_logprobs=config.max_logprobs,
    )


def _sampling_defaults(where: str, own_path: Path, own_said: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults of `where`: auto, octavo (none) or a directory with generation_config.json.

    auto is the model's own file `own_path`, with content `own_said`.
    """
    if where == "octavo":
        return SamplingDefaults()
    if where == "auto":
        return own_defaults(own_path, own_said)
    path = Path(where) / FILE
    if not path.is_file():
        raise ValueError(
            f"generation_config {where!r} is not a directory with generation_config.json: --generation-config takes"
            " one, auto (the model's own) or octavo (none)"
        )
    return chosen_defaults(path, _read_json(path))


def _eos_token_ids(
    tokenizer: Tokenizer, special_tokens: Mapping[str, str], *said: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return every id that ends a text: a checkpoint has them in up to three files, which may differ."""
    found: list[int] = []
    for content in said:
        ids = content.get("eos_token_id")
        for token_id in ids if isinstance(ids, list) else [ids] if ids is not None else []:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < 2**31:
                shown = repr(ids)[:80]
                raise ValueError(f"eos_token_id {shown} in the model's directory is not a token id: put it right there")
            found.append(token_id)
    eos_id = tokenizer.token_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return tuple(dict.fromkeys([*found, *([] if eos_id is None else [eos_id])]))


def _warn_of_no_end(
    directory: Path, chat_template: ChatTemplate, eos_token_ids: tuple[int, ...], tokenizer: Tokenizer
) -> None:
    """Warn if no token ends an answer, or if the chat template ends it with a token that is not an end token."""
    advice = "to change this, set eos_token_id in generation_config.json"
    try:
        token = end_of_turn(chat_template, tokenizer.control_tokens)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}: put it right there") from None
    if not eos_token_ids and not (directory / "modules.json").is_file():  # which makes vectors
        logger.warning(
            "%s names no token that ends an answer: answers go on to max_tokens or a stop; %s", directory, advice
        )
    elif token is not None and tokenizer.token_id(token) not in eos_token_ids:
        logger.warning(
            "%s: the chat template ends an answer with %s (%s), which is not among the model's ends %s: answers may go"
            " on after it; %s",
            *(directory, token, tokenizer.token_id(token), list(eos_token_ids), advice),
        )


def _special_tokens(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token, ... for templates."""
    said = {**_read_json(directory / "special_tokens_map.json"), **tokenizer_config}
    tokens = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = said.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _given_template(
    given: str, named: Mapping[str, Any], special_tokens: Mapping[str, str], tokenizer: Tokenizer
) -> ChatTemplate:
    """Return the template of --chat-template: it is a template itself, a name of one of the model's, or a file."""
    is_template = "{" in given or "\n" in given
    if not is_template and given not in named and not Path(given).is_file():
        own = f", or the name of one of the model's templates: {', '.join(sorted(named))}" if named else ""
        raise ValueError(
            f"chat_template: there is no file {given}. Give the path of a file, or the template itself{own}"
        )
    try:
        template = given if is_template else named[given] if given in named else _template_text(Path(given))
        return ChatTemplate(_checked_text(template), special_tokens, tokenizer.control_tokens)
    except ValueError as error:
        raise ValueError(f"{error}. Put right what --chat-template gives") from None


def _usable_template(
    directory: Path, named: Mapping[str, Any], special_tokens: Mapping[str, str], tokenizer: Tokenizer
) -> ChatTemplate:
    try:
        template = _checked_text(named["default"]) if "default" in named else None
        return ChatTemplate(template, special_tokens, tokenizer.control_tokens, tuple(sorted(named)))
    except ValueError as error:
        raise ValueError(
            f"{error}. Put it right in {directory}: chat_template.jinja, or chat_template in tokenizer_config.json"
        ) from None


def _named_templates(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's templates by name, from the places of transformers; the one without a name is "default".

    Raises ValueError for a template that needs a name and has none.
    """
    said = _read_json(directory / "chat_template.json").get("chat_template", tokenizer_config.get("chat_template"))
    named: dict[str, Any] = {} if said is None else {"default": said}
    if isinstance(said, list):
        named = dict(_named_template(directory, entry) for entry in said)
    elif isinstance(said, dict):
        named = said
    more = {
        path.stem: _template_text(path) for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    path = directory / "chat_template.jinja"
    return {**named, **more, **({"default": _template_text(path)} if path.is_file() else {})}


def _named_template(directory: Path, entry: Any) -> tuple[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ValueError(f"{directory}: the list chat_template has an entry without a name. Put it right there")
    return entry["name"], entry.get("template")


def _checked_text(template: Any) -> str:
    if not isinstance(template, str):
        raise ValueError("the model's chat template is not text")
    return template


def _template_text(path: Path) -> str:
    try:
        return read_bounded(path).decode()
    except ValueError as error:
        raise ValueError(f"{path} is no chat template: {error}. Download the model again") from None


def _positive_int(content: Mapping[str, Any], name: str, path: Path) -> int | None:
    value = content.get(name)
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ValueError(f"{path}: {name} is {value!r}, not a positive integer")
    return value


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Return the object in `path`, or an empty one if there is no such file and it is not required."""
    if not path.is_file():
        if required:
            raise ValueError(f"{path} does not exist")
        return {}
    try:
        content = json.loads(read_bounded(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}. Download the model again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content
