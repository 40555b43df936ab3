"""Chooses how the answers to a request are divided into parts."""

from collections.abc import Callable, Sequence

from octavo.gateway.asking.asked import Asked, AskedTools
from octavo.gateway.asking.model import ServedModel
from octavo.gateway.parsing.calls import Calls
from octavo.gateway.parsing.formats import LISTED, ReasoningFormat, ToolFormat, new_call_id
from octavo.gateway.parsing.harmony import Harmony
from octavo.gateway.parsing.parts import Parser, PlainText, Splitter
from octavo.gateway.parsing.splitters import HarmonySplitter, TextSplitter
from octavo.gateway.parsing.thinking import Tags, Thinking
from octavo.gateway.request_error import RequestError
from octavo.gateway.text.grammar import Grammar, behind_channels, behind_thinking
from octavo.gateway.text.tokenizer import Tokenizer

TAIL_TOKENS = 16  # of a prompt: enough to hold a start tag and the whitespace behind it


def new_splitter(asked: Asked, model: ServedModel, prompt_token_ids: Sequence[int]) -> Splitter:
    """Return a splitter for one answer to a prompt. Raises RequestError if the calls of the model cannot be read."""
    tokenizer, formats = model.files.tokenizer, model.formats
    if not asked.divides:
        return PlainText()
    is_parallel = asked.tools is None or asked.tools.is_parallel
    length_of = _length_of(tokenizer)
    if formats.reasoning is not None and formats.reasoning.tags is None:
        new_id = formats.tools.new_id if formats.tools else new_call_id
        return HarmonySplitter(Harmony(new_id, calls=asked.tools is not None), length_of, is_parallel=is_parallel)
    thinking = _thinking(formats.reasoning, tokenizer, prompt_token_ids)
    calls = _calls(asked.tools, formats.tools) if asked.tools else None
    return TextSplitter(thinking, calls, length_of, is_parallel=is_parallel) if thinking or calls else PlainText()


def followed_grammar(asked: Asked, model: ServedModel, prompt_token_ids: Sequence[int]) -> Grammar | None:
    """Return the grammar that answers to a prompt follow: what a model thinks comes before what is asked for."""
    tokenizer, reasoning = model.files.tokenizer, model.formats.reasoning
    if asked.grammar is None or reasoning is None or not asked.divides:
        return asked.grammar
    token_ids = {marker: tokenizer.token_id(marker) for marker in reasoning.markers}
    special_tokens = {name: token_id for name, token_id in token_ids.items() if token_id is not None}
    if reasoning.tags is None:
        return behind_channels(asked.grammar, special_tokens)
    start, end = reasoning.tags.start, reasoning.tags.end
    is_open = reasoning.is_always_open or _ends_open(prompt_token_ids, reasoning.tags, tokenizer)
    return behind_thinking(asked.grammar, start, end, special_tokens, is_open=is_open)


def shown_token_ids(asked: Asked, model: ServedModel) -> frozenset[int]:
    """Return the special tokens that must be in the text, so that a splitter sees them."""
    if not asked.divides:
        return frozenset()
    formats = model.formats
    markers = [
        *(formats.reasoning.markers if formats.reasoning else ()),
        *(formats.tools.markers if formats.tools and asked.tools else ()),
    ]
    token_ids = map(model.files.tokenizer.token_id, markers)
    return frozenset(token_id for token_id in token_ids if token_id is not None)


def _thinking(reasoning: ReasoningFormat | None, tokenizer: Tokenizer, prompt: Sequence[int]) -> Thinking | None:
    if reasoning is None or reasoning.tags is None:
        return None
    is_open = reasoning.is_always_open or _ends_open(prompt, reasoning.tags, tokenizer)
    return Thinking(reasoning.tags, is_open=is_open)


def _ends_open(prompt: Sequence[int], tags: Tags, tokenizer: Tokenizer) -> bool:
    """Whether a prompt ends with the start tag: then the answer begins inside the thinking."""
    tail = tokenizer.decode(list(prompt[-TAIL_TOKENS:]), skip_special_tokens=False)
    return tail.rstrip().endswith(tags.start)


def _calls(tools: AskedTools, chosen: ToolFormat | None) -> Parser:
    names = frozenset(tool.name for tool in tools.tools)
    if tools.must_call:
        return Calls(LISTED, names, chosen.new_id if chosen else new_call_id)
    if chosen is None:
        message = (
            "it is not known how this model calls tools: start the server with --tool-call-parser, or set tool_choice"
            " to required, or to one tool"
        )
        raise RequestError(message, param="tools", code="unsupported_value")
    return chosen.parser(names, chosen.new_id)


def _length_of(tokenizer: Tokenizer) -> Callable[[int], int]:
    return lambda token_id: len(tokenizer.token_text(token_id))
