"""Which tokens the grammar of a sequence allows next.

A matcher is soft state: it is built of the grammar and of all the output. Threads build matchers and compute their
masks, each for the token after the last that is known; a step takes the masks that are there in time.
"""

import os
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from octavo.protocol.grammars import PARSER_LIMITS, shown_reason
from octavo.protocol.messages import SequenceInit, unpack_ids
from octavo.protocol.model_files.bounded import read_bounded

# W words of 32 tokens

NUM_BUILDERS = 2
MAX_MASK_THREADS = 8
NUM_KEPT = 64  # grammars that stay compiled
GRACE_S = 0.002  # that a step waits for masks; most take a tenth of this
IDLE_S = 0.01  # that a step waits in which all sequences sit out


class GrammarError(Exception):
    """The grammar cannot be followed: it does not compile, or is too much work."""


class Grammars:
    """The compiled grammars, and the threads of their matchers. Only the step's thread calls it, but for `compile`."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        """`directory` is the model's; its tokenizer is read when the first grammar comes."""
        self.vocab_size = vocab_size
        self._directory = directory
        self._tokenizer: LLTokenizer | None = None
        self.tokenizer_ends: list[int] = []
        self._reading = Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._keeping = Lock()
        self.builders = ThreadPoolExecutor(NUM_BUILDERS, thread_name_prefix="grammar-build")
        num_threads = min(MAX_MASK_THREADS, max(1, (os.cpu_count() or 1) // 2))
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar-mask")

    def matcher(self, init: SequenceInit, present: "Matcher | None") -> "Matcher":
        """Return a matcher that has read the output of `init`: `present`, if it has read a beginning of it."""
        output = unpack_ids(init.output_token_ids)
        if present is not None and present.continues(init.grammar, output):
            present.read_up_to(output)
            return present
        if present is not None:
            present.close()
        return Matcher(self, init, output)

    def compile(self, grammar: str) -> LLMatcher:
        """Return a matcher that has read nothing. Raises GrammarError."""
        with self._keeping:
            if kept := self._compiled.get(grammar):
                self._compiled.move_to_end(grammar)
                return kept.deep_copy()
        built = LLMatcher(self._read_tokenizer(), grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        if built.is_error():
            raise GrammarError(f"the grammar does not compile: {shown_reason(built.get_error())}")
        with self._keeping:
            self._compiled[grammar] = built
            if len(self._compiled) > NUM_KEPT:
                self._compiled.popitem(last=False)
            return built.deep_copy()

    def _read_tokenizer(self) -> LLTokenizer:
        with self._reading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(read_bounded(self._directory / "tokenizer.json").decode())
                except (OSError, ValueError) as error:
                    reason = f"the tokenizer of this model cannot be used for grammars: {shown_reason(str(error))}"
                    raise GrammarError(reason) from None
                self.tokenizer_ends = [each for each in self._tokenizer.eos_tokens if each < self.vocab_size]
            return self._tokenizer


class Matcher:
    """Follows one sequence. `error` is set once the sequence cannot go on."""

    def __init__(self, grammars: Grammars, init: SequenceInit, output: "array[int]") -> None:
        self._grammars, self._grammar = grammars, init.grammar
        known = range(grammars.vocab_size)  # a checkpoint may name ends beyond it
        self._eos = [each for each in init.sampling.eos_token_ids if each in known]
        self._stops = [*self._eos, *(each for each in init.sampling.stop_token_ids if each in known)]
        self._min_tokens, self._ends_late = init.sampling.min_tokens, init.sampling.ends_late
        self._output = output
        self._matcher: LLMatcher | None = None
        self._num_read = 0  # by `_matcher`
        self._working = Lock()  # of `_matcher` and `_num_read`
        self._work: Future[np.ndarray] = grammars.builders.submit(self._mask, len(output))
        self.error = ""

    @property
    def is_built(self) -> bool:
        """Whether the grammar is compiled, or cannot be."""
        return self._matcher is not None or self._work.done()

    def continues(self, grammar: str, output: "array[int]") -> bool:
        """Return whether what this matcher knows is a beginning of `output`."""
        return not self.error and grammar == self._grammar and self._output == output[: len(self._output)]

    def read_up_to(self, output: "array[int]") -> None:
        """Learn all of `output`, which goes on after the known tokens."""
        if len(output) > len(self._output):
            self._output.extend(output[len(self._output) :])
            self._work = self._grammars.threads.submit(self._mask, len(self._output))

    def learn(self, token_id: int) -> None:
        """Learn the next token, and have the mask of the one after it computed."""
        self._output.append(token_id)
        self._work = self._grammars.threads.submit(self._mask, len(self._output))

    def close(self) -> None:
        """Do not begin what has not been begun."""
        self._work.cancel()

    @staticmethod
    def wait_for(matchers: "Iterable[Matcher]", timeout_s: float, *, first: bool = False) -> None:
        """Wait until all of these, or the first, have their masks."""
        work = [each._work for each in matchers]
        if work and not all(each.done() for each in work):
            wait(work, timeout_s, FIRST_COMPLETED if first else "ALL_COMPLETED")

    def mask(self) -> np.ndarray | None:
        """Return allowed_W, int32, for the next token: a bit that is set allows its token. None: late, or an error."""
        if not self._work.done():
            return None
        try:
            return self._work.result()
        except GrammarError as error:
            self.error = str(error)
        except Exception as error:
            self.error = f"the grammar failed: {shown_reason(str(error))}"
        return None

    def _mask(self, num_tokens: int) -> np.ndarray:
        """In a thread: return the mask after `num_tokens` of the output."""
        with self._working:
            if self._matcher is None:
                self._matcher = self._grammars.compile(self._grammar)
            matcher = self._matcher
            new = list(self._output[self._num_read : num_tokens])
            if new and not matcher.consume_tokens(new):
                raise GrammarError(f"the grammar does not go on: {_reason(matcher)}")
            self._num_read = max(self._num_read, num_tokens)
            packed, is_end = matcher.compute_bitmask(), matcher.is_accepting()
            if matcher.is_error():
                raise GrammarError(f"the grammar cannot be followed: {_reason(matcher)}")
        return self._allowed(packed, num_tokens, is_end=is_end)

    def _allowed(self, packed: bytes, num_tokens: int, *, is_end: bool) -> np.ndarray:
        """Return a mask with what sampling changes: ends that the grammar does not know, and ends that come too early.

        What would leave no token is not done: the grammar comes first.
        """
        vocab_size = self._grammars.vocab_size
        allowed_W = np.zeros(-(-vocab_size // 32), np.uint32)
        given = np.frombuffer(packed, np.uint32)[: len(allowed_W)]
        allowed_W[: len(given)] = given
        if vocab_size % 32:
            allowed_W[-1] &= np.uint32((1 << vocab_size % 32) - 1)
        if is_end:  # the tokenizer has an end of its own, which need not be one of the model's
            for token_id in self._grammars.tokenizer_ends:
                allowed_W[token_id // 32] &= ~np.uint32(1 << token_id % 32)
            for token_id in self._eos:
                allowed_W[token_id // 32] |= np.uint32(1 << token_id % 32)
        if num_tokens < self._min_tokens:
            allowed_W = _without(allowed_W, self._stops)
        elif self._ends_late:
            allowed_W = _without(allowed_W, self._eos)
        if not allowed_W.any():
            raise GrammarError("the grammar cannot be followed: no token of this model fits here")
        return allowed_W.view(np.int32)


def _without(allowed_W: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    """Return the mask without these tokens, or as it is if nothing would be left."""
    fewer_W = allowed_W.copy()
    for token_id in token_ids:
        fewer_W[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return fewer_W if fewer_W.any() else allowed_W


def _reason(matcher: LLMatcher) -> str:
    return shown_reason(matcher.get_error()) or matcher.stop_reason()
