"""What gateway and executor agree on about grammars: how large one is, and how much work llguidance may do for it."""

from typing import TypedDict

MAX_GRAMMAR_BYTES = 256 << 10


class ParserLimits(TypedDict):
    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_lexer_states: int
    max_grammar_size: int
    verbose_errors: bool


# For llguidance's `LLParserLimits`: steps, not seconds, so that every machine says the same.
PARSER_LIMITS: ParserLimits = {
    "initial_lexer_fuel": 1_000_000,  # to compile; some ten milliseconds
    "step_lexer_fuel": 200_000,  # for the mask of one token; some ten milliseconds
    "step_max_items": 50_000,
    "max_lexer_states": 25_000,  # one or two KB each
    "max_grammar_size": 500_000,
    "verbose_errors": False,  # errors do not repeat the text
}
