"""`python -m octavo.gateway.grammar_checker DIRECTORY`: compiles grammars for a gateway, to find out whether they do.

Grammars come through standard input, and reasons go to standard output: empty if a grammar can be used. The length
comes before each. A grammar that takes too long ends the process, by a signal: nothing else ends llguidance's work.
"""

import os
import resource
import signal
import sys
from io import RawIOBase
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from octavo.protocol.grammars import COMPILE_S, LENGTH_BYTES, PARSER_LIMITS, shown_reason
from octavo.protocol.model_files.bounded import read_bounded

MAX_BYTES = 4 << 30  # of memory


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a library that prints must not write between the answers
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    try:
        tokenizer = LLTokenizer(read_bounded(Path(sys.argv[1]) / "tokenizer.json").decode())
    except (OSError, ValueError) as error:
        _answer(answers, f"the tokenizer of this model cannot be used for grammars: {shown_reason(str(error))}")
        return
    _answer(answers, "")
    while length := sys.stdin.buffer.read(LENGTH_BYTES):
        grammar = sys.stdin.buffer.read(int.from_bytes(length, "big")).decode()
        signal.setitimer(signal.ITIMER_PROF, COMPILE_S)  # of processor time; SIGPROF ends the process
        reason = _reason(tokenizer, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _answer(answers, reason)


def _reason(tokenizer: LLTokenizer, grammar: str) -> str:
    """Return why a grammar cannot be used, or an empty string."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return shown_reason(matcher.get_error()) if matcher.is_error() else ""


def _answer(answers: RawIOBase, reason: str) -> None:
    content = reason.encode()
    answers.write(len(content).to_bytes(LENGTH_BYTES, "big") + content)


if __name__ == "__main__":
    main()
