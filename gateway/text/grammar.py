"""Grammars: which texts an answer may be. A grammar travels as one string, which llguidance reads in the executor.

The functions check what they are given only as far as they need it; whether the whole compiles, and in how long, is
found out by a process that can be ended (`gateway/reading/grammar_checks.py`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from octavo.gateway.request_error import RequestError
from octavo.protocol.grammars import MAX_GRAMMAR_BYTES

# Between two tokens of JSON: nothing, a space, or a new line with its indentation. So no answer can end in blanks only.
WHITESPACE = r"(\n[ \t]{0,16}| )?"
JSON_OPTIONS = {"whitespace_pattern": WHITESPACE, "whitespace_flexible": True, "coerce_one_of": False, "lenient": False}
# The formats of strings that llguidance enforces. Any other is an annotation, as JSON Schema says.
FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

MAX_GBNF_CHARACTERS = 16_384  # which are converted in Python
HALF_PAIR = "it has half of a surrogate pair"

ASCII_CLASSES = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}

ONE_SCHEMA = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
LISTED_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class Grammar(msgspec.Struct, frozen=True):
    """`text` is what llguidance reads; `param` is the caller's field, which errors name."""

    text: str
    param: str


class Tagged(NamedTuple):
    """A JSON value between two texts, as formats of tool calls have it."""

    begin: str
    schema: Mapping[str, Any] | bool
    end: str


def json_schema_grammar(schema: Any, param: str) -> Grammar:
    """Return the grammar of JSON values that are valid by `schema`, an object, a bool, or the JSON text of either.

    Raises RequestError for anything else.
    """
    return _grammar([{"json_schema": _json_schema(schema, param)}], param)


def json_object_grammar(param: str) -> Grammar:
    """Return the grammar of all JSON objects."""
    return json_schema_grammar({"type": "object"}, param)


def regex_grammar(regex: str, param: str) -> Grammar:
    """Return the grammar of texts that the whole of `regex` matches."""
    inner = regex.removeprefix("^")  # the whole is matched without anchors
    if inner.endswith("$") and not (len(inner) - 1 - len(inner[:-1].rstrip("\\"))) % 2:
        inner = inner[:-1]
    try:
        return _checked(LLMatcher.grammar_from_regex(_ascii(inner)), param)
    except UnicodeEncodeError:
        raise _wrong(HALF_PAIR, param) from None


def choice_grammar(choices: Sequence[str], param: str) -> Grammar:
    """Return the grammar of a few texts. Raises RequestError for no choice or an empty one."""
    if not choices or not all(choices):
        raise RequestError(f"{param} must have at least one text, and none that is empty", param=param)
    return lark_grammar("start: " + " | ".join(map(_literal, dict.fromkeys(choices))), param)


def lark_grammar(text: str, param: str) -> Grammar:
    """Return a grammar that is written in llguidance's kind of Lark, or in GBNF. Raises RequestError if it is neither.

    A grammar in GBNF has a rule `root ::=`.
    """
    if "::=" in text:
        if len(text) > MAX_GBNF_CHARACTERS:
            raise _wrong(f"a grammar in GBNF may have {MAX_GBNF_CHARACTERS} characters", param)
        try:
            text = any_to_lark(text)
        except Exception as error:  # the library names no kind of error
            raise _wrong(str(error), param) from None
    return _grammar([{"lark_grammar": text}], param)


def tagged_grammar(
    bodies: Sequence[Tagged],
    param: str,
    *,
    special_tokens: Mapping[str, int] | None = None,
    separator: str = "",
    most: int | None = 1,
) -> Grammar:
    """Return the grammar of one or more of `bodies`, at most `most` (None: any number), with `separator` between them.

    In the texts around a schema, the names of `special_tokens` stand for these tokens, by their ids. Raises
    RequestError for a schema that is no schema.
    """
    token_ids = special_tokens or {}
    repeated = "" if most == 1 else f" (separator body){'*' if most is None else f'{{0,{most - 1}}}'}"
    rules = [f"start: body{repeated}", "body: " + " | ".join(f"body_{index}" for index in range(len(bodies)))]
    if repeated:
        rules.append(f"separator: {_texts(separator, token_ids) or _literal('')}")
    for index, (begin, schema, end) in enumerate(bodies):
        value = f"%json {_dump(_json_schema(schema, param))}"
        rules.append(f"body_{index}: {_texts(begin, token_ids)} {value} {_texts(end, token_ids)}")
    return lark_grammar("\n".join(rules), param)


def behind_thinking(
    grammar: Grammar, start: str, end: str, special_tokens: Mapping[str, int], *, is_open: bool
) -> Grammar:
    """Return the grammar of texts that follow `grammar` after what is thought between the tags.

    `is_open`: the thinking has begun. Else the model need not think.
    """
    if end in special_tokens:
        thought, rules = "THOUGHT end", [r"THOUGHT: /(.|\n)*/", f"end: {_texts(end, special_tokens)}"]
    else:
        escaped = re.escape(end).replace("/", r"\/")
        thought, rules = "thought", [rf"thought[lazy]: /(.|\n)*{escaped}/"]
    thinking = f"{thought} SPACE" if is_open else f"({_texts(start, special_tokens)} {thought} SPACE)?"
    return _behind(f"{thinking} @answer", [*rules, r"SPACE: /\s{0,4}/"], grammar)


def behind_channels(grammar: Grammar, special_tokens: Mapping[str, int]) -> Grammar:
    """Return the grammar of harmony's messages, of which the last is on the channel final and follows `grammar`."""
    thought = (
        _texts("<|channel|>analysis<|message|>", special_tokens),
        _texts("<|end|><|start|>assistant", special_tokens),
    )
    final = _texts("<|channel|>final<|message|>", special_tokens)
    return _behind(f"({thought[0]} THOUGHT {thought[1]})? {final} @answer", [r"THOUGHT: /(.|\n)*/"], grammar)


def _behind(start: str, rules: Sequence[str], grammar: Grammar) -> Grammar:
    [answer] = json.loads(grammar.text)["grammars"]
    lark = "\n".join([f"start: {start}", *rules])
    return _grammar([{"lark_grammar": lark}, {**answer, "name": "answer"}], grammar.param)


def _grammar(grammars: Sequence[Mapping[str, Any]], param: str) -> Grammar:
    return _checked(_dump({"grammars": grammars}), param)


def _checked(text: str, param: str) -> Grammar:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise _wrong(HALF_PAIR, param) from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise _wrong(f"it takes {num_bytes} bytes, of {MAX_GRAMMAR_BYTES} at most", param)
    return Grammar(text, param)


def _wrong(reason: str, param: str) -> RequestError:
    return RequestError(f"{param} cannot be used: {reason}", param=param, code="invalid_grammar")


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _texts(text: str, token_ids: Mapping[str, int]) -> str:
    """Return the Lark of a text in which names of special tokens stand for the tokens."""
    if not token_ids:
        return _literal(text) if text else ""
    pieces = re.split(f"({'|'.join(map(re.escape, sorted(token_ids, key=len, reverse=True)))})", text)
    return " ".join(f"<[{token_ids[piece]}]>" if piece in token_ids else _literal(piece) for piece in pieces if piece)


def _json_schema(schema: Any, param: str) -> dict[str, Any]:
    """Return a schema as llguidance takes it. Raises RequestError if `schema` is none."""
    try:
        if isinstance(schema, str | bytes):
            schema = msgspec.json.decode(schema)
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, Mapping):
            raise _wrong("a JSON schema is an object", param)
        return {**_as_read(schema), "x-guidance": JSON_OPTIONS}
    except (msgspec.DecodeError, UnicodeError):
        raise _wrong("it is not JSON", param) from None
    except RecursionError:
        raise _wrong("it is nested too deeply", param) from None


def _as_read(schema: Any) -> Any:
    """Return a schema in which formats are those that are known, and each variant of a tagged union has its tag."""
    if not isinstance(schema, Mapping):
        return schema
    read = dict(schema)
    if "format" in read and read["format"] not in FORMATS:
        del read["format"]
    if isinstance(read.get("pattern"), str):
        read["pattern"] = _ascii(read["pattern"])
    for key in read.keys() & set(ONE_SCHEMA):
        read[key] = _as_read(read[key])
    for key in read.keys() & set(LISTED_SCHEMAS):
        if isinstance(read[key], list):
            read[key] = [_as_read(each) for each in read[key]]
    for key in read.keys() & set(NAMED_SCHEMAS):
        if isinstance(read[key], Mapping):
            read[key] = {name: _as_read(each) for name, each in read[key].items()}
    tag = read.get("discriminator")
    if isinstance(tag, Mapping) and isinstance(tag.get("propertyName"), str) and isinstance(read.get("oneOf"), list):
        read["oneOf"] = [_requiring(each, tag["propertyName"]) for each in read["oneOf"]]
    return read


def _ascii(regex: str) -> str:
    """Return a regex in which a digit and a letter of a word are those of ASCII, as JSON Schema's dialect has them.

    What it matches other validators take as well; llguidance's own have digits of every script.
    """
    pieces, is_in_class, at = [], False, 0
    while at < len(regex):
        size = 2 if regex[at] == "\\" else 1
        piece = regex[at : at + size]
        if size == 1 and piece in "[]":
            is_in_class = piece == "["
        inner = ASCII_CLASSES.get(piece)
        pieces.append(piece if inner is None else inner if is_in_class else f"[{inner}]")
        at += size
    return "".join(pieces)


def _requiring(schema: Any, name: str) -> Any:
    """Return a variant that must have the property `name`: by it alone is the variant known from the others."""
    if not isinstance(schema, Mapping) or not isinstance(required := schema.get("required", []), list):
        return schema
    return {**schema, "required": list(dict.fromkeys([*required, name]))}
