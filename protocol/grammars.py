"""What the processes agree on about grammars: how large one is, and how much work llguidance may do for it."""

from typing import TypedDict

MAX_GRAMMAR_BYTES = 256 << 10
COMPILE_S = 0.6  # of processor time, with the model's tokenizer: what takes longer is refused before it is generated
LENGTH_BYTES = 4
MAX_REASON_CHARACTERS = 500


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


def shown_reason(text: str) -> str:
    """Return llguidance's error in one line that a user understands."""
    if "coerce_one_of" in text:
        return "oneOf needs variants that exclude each other, by their types or by a required tag: or use anyOf"
    first, *others = text.strip().splitlines() or [""]
    said = [first.strip().rstrip(":"), *(line.removeprefix("error: ") for line in others if line.startswith("error: "))]
    return ": ".join(said)[:MAX_REASON_CHARACTERS]
