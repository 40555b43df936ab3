"""The fields that say which texts an answer may be: `response_format`, `structured_outputs` and the `guided_` ones."""

from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from octavo.gateway.openai.neutral import Unsupported, UnsupportedSwitch, refuse_unsupported
from octavo.gateway.request_error import RequestError, unsupported
from octavo.gateway.text.grammar import (
    Grammar,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)

MAX_GRAMMAR_CHARACTERS = 64 << 10
MAX_GRAMMAR_CHOICES = 4096

_OBJECT = {"type": "object"}
JsonSchema = Annotated[Any, Meta(extra_json_schema=_OBJECT)]  # gateway/text/grammar.py says what is none
SchemaOrText = Annotated[Any, Meta(extra_json_schema={"anyOf": [_OBJECT, {"type": "string"}]})]
GrammarText = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_GRAMMAR_CHOICES)]


class NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    schema: JsonSchema = None
    strict: bool | None = None  # answers are always valid
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    schema: JsonSchema = None  # of a json_object, as llama.cpp takes it


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's field: one kind of grammar."""

    json: SchemaOrText = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None

    structural_tag: Unsupported = None
    whitespace_pattern: Unsupported = None
    disable_any_whitespace: UnsupportedSwitch = None
    disable_additional_properties: UnsupportedSwitch = None


class GrammarFields(Protocol):
    """The fields of a body."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: Any
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None


def asked_grammar(body: GrammarFields) -> Grammar | None:
    """Return the grammar that a body asks for. Raises RequestError for two of them, and for what is none."""
    found = [
        *_of_response_format(body.response_format),
        *_of_structured_outputs(body.structured_outputs),
        *_of_guided(body),
    ]
    if len(found) > 1:
        first, second, *_ = found
        reason = f"{first.param} and {second.param} exclude each other: an answer follows one"
        raise RequestError(reason, param=second.param, code="invalid_value")
    return found[0] if found else None


def _of_response_format(given: ResponseFormat | None) -> list[Grammar]:
    if given is None:
        return []
    if given.type == "structural_tag":
        raise unsupported("response_format", "response_format of type 'structural_tag'")
    if given.json_schema is not None and given.type != "json_schema":
        raise _needs("response_format.json_schema", "type 'json_schema'")
    if given.schema is not None and given.type != "json_object":
        raise _needs("response_format.schema", "type 'json_object': a json_schema has its schema in json_schema.schema")
    if given.type == "text":
        return []
    if given.type == "json_object":
        param = "response_format"
        if given.schema is None:
            return [json_object_grammar(param)]
        return [json_schema_grammar(given.schema, f"{param}.schema")]
    param = "response_format.json_schema"
    schema = None if given.json_schema is None else given.json_schema.schema
    if schema is None:
        name = param if given.json_schema is None else f"{param}.schema"
        raise RequestError(f"{name} is required", param=name, code="missing_required_parameter")
    return [json_schema_grammar(schema, f"{param}.schema")]


def _needs(param: str, needed: str) -> RequestError:
    return RequestError(f"{param} needs {needed}", param=param, code="invalid_value")


def _of_structured_outputs(given: StructuredOutputs | None) -> list[Grammar]:
    if given is None:
        return []
    path = "structured_outputs"
    refuse_unsupported(given, f"{path}.")
    found = _grammars(given.json, given.regex, given.choice, given.grammar, f"{path}.")
    if given.json_object:
        found.append(json_object_grammar(f"{path}.json_object"))
    if not found:
        reason = f"{path} needs one of json, regex, choice, grammar and json_object"
        raise RequestError(reason, param=path, code="invalid_value")
    return found


def _of_guided(body: GrammarFields) -> list[Grammar]:
    return _grammars(body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar, "guided_")


def _grammars(
    schema: Any, regex: str | None, choice: list[str] | None, grammar: str | None, prefix: str
) -> list[Grammar]:
    found = []
    if schema is not None:
        found.append(json_schema_grammar(schema, f"{prefix}json"))
    if regex is not None:
        found.append(regex_grammar(regex, f"{prefix}regex"))
    if choice is not None:
        found.append(choice_grammar(choice, f"{prefix}choice"))
    if grammar is not None:
        found.append(lark_grammar(grammar, f"{prefix}grammar"))
    return found
