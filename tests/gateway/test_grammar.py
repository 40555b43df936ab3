"""Grammars: which texts each of them takes, as llguidance reads it, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from octavo.gateway.request_error import RequestError
from octavo.gateway.text.grammar import (
    Grammar,
    Tagged,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    tagged_grammar,
)

PARAM = "response_format"


@pytest.fixture(scope="module")
def tokenizer(demo_directory: Path) -> LLTokenizer:
    return LLTokenizer((demo_directory / "tokenizer.json").read_text())


class Reads:
    def __init__(self, tokenizer: LLTokenizer, grammar: Grammar) -> None:
        self._tokenizer, self._matcher = tokenizer, LLMatcher(tokenizer, grammar.text, log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def __call__(self, text: str) -> bool:
        """Return whether `text` is a whole answer."""
        self._matcher.reset()
        return self._begins(text) and self._matcher.is_accepting()

    def _begins(self, text: str) -> bool:
        token_ids = self._tokenizer.tokenize_str(text, parse_special=True)
        return self._matcher.try_consume_tokens(token_ids) == len(token_ids)


def reads_schema(tokenizer: LLTokenizer, schema: Any) -> Reads:
    return Reads(tokenizer, json_schema_grammar(schema, PARAM))


def test_blanks_between_json_tokens_are_bounded(tokenizer: LLTokenizer) -> None:
    reads = Reads(tokenizer, json_object_grammar(PARAM))
    assert reads('{"a":1}')
    assert reads('{"a": 1, "b": [1, 2]}')
    assert reads('{\n  "a": {\n    "b": []\n  }\n}')
    assert not reads('{"a":  1}')
    assert not reads("{" + " " * 20 + "}")
    assert not reads("{\n\n}")
    assert not reads("{} ")
    assert not reads(" {}")
    assert not reads("[1]")


def test_a_schema_may_be_an_object_a_bool_or_json_text(tokenizer: LLTokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for given in (schema, json.dumps(schema), json.dumps(schema).encode()):
        reads = reads_schema(tokenizer, given)
        assert reads('{"a":1}')
        assert not reads("{}")
    assert reads_schema(tokenizer, True)("1")


def test_bounds_enums_consts_and_refs(tokenizer: LLTokenizer) -> None:
    reads = reads_schema(tokenizer, {"type": "integer", "minimum": 1, "maximum": 10})
    assert reads("10")
    assert not reads("11")
    assert not reads("0")
    assert reads_schema(tokenizer, {"enum": ["é", 1, None]})('"é"')
    assert not reads_schema(tokenizer, {"const": "a"})('"b"')
    tree = {"$ref": "#/$defs/T", "$defs": {"T": {"type": "array", "items": {"$ref": "#/$defs/T"}}}}
    assert reads_schema(tokenizer, tree)("[[],[[]]]")
    closed = {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False}
    assert not reads_schema(tokenizer, closed)('{"b":1}')


def test_known_formats_are_enforced_and_others_are_annotations(tokenizer: LLTokenizer) -> None:
    assert reads_schema(tokenizer, {"type": "string", "format": "date"})('"2024-02-29"')
    assert not reads_schema(tokenizer, {"type": "string", "format": "date"})('"soon"')
    secret = {"type": "object", "properties": {"format": {"type": "string", "format": "password"}}}
    assert reads_schema(tokenizer, secret)('{"format":"secret"}')


def test_one_of_as_pydantic_writes_it_for_a_tagged_union(tokenizer: LLTokenizer) -> None:
    """A tag has a default, so pydantic does not require it; without it two variants would fit."""
    variants = {
        name: {
            "type": "object",
            "properties": {"kind": {"const": name, "default": name, "type": "string"}, "n": {"type": "integer"}},
        }
        for name in ("cat", "dog")
    }
    schema = {
        "type": "object",
        "properties": {
            "pet": {
                "discriminator": {"mapping": {name: f"#/$defs/{name}" for name in variants}, "propertyName": "kind"},
                "oneOf": [{"$ref": f"#/$defs/{name}"} for name in variants],
            }
        },
        "required": ["pet"],
        "$defs": variants,
    }
    reads = reads_schema(tokenizer, schema)
    assert reads('{"pet":{"kind":"dog","n":1}}')
    assert not reads('{"pet":{"n":1}}')
    assert not reads('{"pet":{"kind":"cow"}}')


def test_a_schema_cannot_change_how_it_is_read(tokenizer: LLTokenizer) -> None:
    schema = {"type": "array", "x-guidance": {"whitespace_pattern": " *", "lenient": True}}
    assert not reads_schema(tokenizer, schema)("[   1]")


@pytest.mark.parametrize("regex", ["[ab]+/\\$", "^[ab]+/\\$", "[ab]+/\\$$", "^[ab]+/\\$$"])
def test_the_whole_of_a_regex_matches(tokenizer: LLTokenizer, regex: str) -> None:
    reads = Reads(tokenizer, regex_grammar(regex, PARAM))
    assert reads("ab/$")
    assert not reads("ab/")
    assert not reads("xab/$")


def test_digits_and_letters_of_words_are_those_of_ascii(tokenizer: LLTokenizer) -> None:
    """In other scripts they would match by some validators alone."""
    for reads in (
        Reads(tokenizer, regex_grammar(r'"\d[\w-]"', PARAM)),
        reads_schema(tokenizer, {"type": "string", "pattern": r"^\d[\w-]$"}),
    ):
        assert all(map(reads, ['"1-"', '"1a"', '"1_"']))
        assert not any(map(reads, ['"\u0661-"', '"1\u00e9"']))
    assert Reads(tokenizer, regex_grammar(r"\\d\[[\]\d]", PARAM))("\\d[7")


def test_choices_that_share_beginnings(tokenizer: LLTokenizer) -> None:
    reads = Reads(tokenizer, choice_grammar(["yes", "yesterday", 'a "b"\n', "é😀", "yes"], PARAM))
    assert all(map(reads, ["yes", "yesterday", 'a "b"\n', "é😀"]))
    assert not any(map(reads, ["y", "yester", "no"]))


@pytest.mark.parametrize("text", ['start: "a" | "b"', 'root ::= "a" | "b"'])
def test_a_grammar_in_lark_or_gbnf(tokenizer: LLTokenizer, text: str) -> None:
    reads = Reads(tokenizer, lark_grammar(text, PARAM))
    assert reads("a")
    assert not reads("c")


def test_schemas_between_texts_and_special_tokens(tokenizer: LLTokenizer) -> None:
    [start] = tokenizer.tokenize_str("<|im_start|>", parse_special=True)
    value = {"$ref": "#/$defs/I", "$defs": {"I": {"type": "integer"}}}
    bodies = [
        Tagged('<|im_start|>{"name": "f", "arguments": ', value, "}"),
        Tagged('<|im_start|>{"name": "g", "arguments": ', True, "}"),
    ]
    one = tagged_grammar(bodies, PARAM, special_tokens={"<|im_start|>": start}, separator="\n")
    reads = Reads(tokenizer, one)
    call_f, call_g = ('<|im_start|>{"name": "f", "arguments": 5}', '<|im_start|>{"name": "g", "arguments": []}')
    assert reads(call_f)
    assert reads(call_g)
    assert not reads(f"{call_f}\n{call_g}")
    assert not reads('<|im_start|>{"name": "f", "arguments": "5"}')
    any_number = tagged_grammar(bodies, PARAM, special_tokens={"<|im_start|>": start}, separator="\n", most=None)
    assert Reads(tokenizer, any_number)("\n".join([call_f, call_g, call_f]))
    plain = tagged_grammar([Tagged("<call>", {"type": "null"}, "</call>")], PARAM, most=2)
    assert Reads(tokenizer, plain)("<call>null</call><call>null</call>")
    assert not Reads(tokenizer, plain)("<call>null</call>" * 3)


@pytest.mark.parametrize("schema", [1, [], None, "{", "[1]", '{"a": "\ud800"}', {"const": "\ud800"}])
def test_what_is_no_schema_is_refused_by_name(schema: Any) -> None:
    with pytest.raises(RequestError) as caught:
        json_schema_grammar(schema, PARAM)
    assert (caught.value.param, caught.value.status) == (PARAM, 400)


def test_what_is_nested_too_deeply_or_too_long_is_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(5000):
        nested = {"items": nested}
    for make in (
        lambda: json_schema_grammar(nested, PARAM),
        lambda: json_schema_grammar({"enum": ["x" * 300_000]}, PARAM),
        lambda: lark_grammar("root ::= " + "(" * 9000, PARAM),
        lambda: lark_grammar("root ::= " + '"a" ' * 9000, PARAM),
        lambda: regex_grammar("\ud800", PARAM),
        lambda: choice_grammar([], PARAM),
        lambda: choice_grammar(["a", ""], PARAM),
    ):
        with pytest.raises(RequestError, match=PARAM):
            make()
