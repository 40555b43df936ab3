"""Turns text into token ids, and token ids back into text."""

import math
import re
import secrets
from collections.abc import Generator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from octavo.gateway.text.byte_level import BYTES_OF_CHARACTERS
from octavo.gateway.text.chat_template import RenderedChat
from octavo.gateway.text.detokenizer import Detokenizer
from octavo.gateway.text.least_tokens import LeastTokens
from octavo.gateway.text.steps import Steps, finished
from octavo.gateway.text.text_cuts import SLICE_CHARACTERS, find_cuts, slices
from octavo.protocol.model_files.bounded import LARGEST_LIST_BYTES, read_bounded

AGAIN = "Download the model again"


class TooManyTokens(ValueError):  # noqa: N818  (a property of the text)
    """The text has at least `at_least` tokens, which is more than is allowed. The exact number is not known."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the text has at least {at_least} tokens")
        self.at_least = at_least


class Tokenizer:
    """The model's tokenizer.json. Several threads may use it at once."""

    def __init__(self, directory: Path) -> None:
        """Raises ValueError if `directory` has no usable tokenizer.json."""
        self.path = directory / "tokenizer.json"
        content = _read(self.path)
        self._tokenizer = _load(content, self.path)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in added.items() if token.special}
        self.special_token_ids = frozenset(special)
        self.control_tokens = tuple(token.content for token in special.values())
        self._added = {token_id: token.content for token_id, token in added.items()}
        # A normalizer could turn other text into a control token: then every chat needs the unforgeable tokenizer.
        self._normalizes_control_tokens = self._tokenizer.normalizer is not None and any(
            token.normalized for token in special.values()
        )
        described = msgspec.json.decode(content)
        try:
            self._cut, self._least = find_cuts(described), LeastTokens(described)
            self._decoder_kinds = _kinds(described.get("decoder") or {})
        except (
            AttributeError,
            IndexError,
            KeyError,
            TypeError,
        ) as error:  # the library accepts lists where objects belong
            raise ValueError(f"{self.path} cannot be used: its parts have wrong types. {AGAIN}") from error
        self._around = self._find_around()
        # The ByteLevel decoder only joins bytes: a token's text depends on other tokens only inside a character.
        self._texts: dict[int, str] | None = {} if self._decoder_kinds == {"ByteLevel"} else None

    def encode_steps(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> Steps[list[int]]:
        """Return, in steps, the ids of a raw prompt. Its control tokens count, and the tokenizer's BOS is added once.

        Raises ValueError if `text` is not valid Unicode, and TooManyTokens as soon as it is known that there are more
        than `max_tokens`. The result can have more than `max_tokens` too.
        """
        before, behind = self._around if add_special_tokens else ([], [])
        yield from self._check_least(text, max_tokens)
        token_ids = yield from self._encode(self._tokenizer, text, max_tokens)
        if len(before) == 1 and before[0] in self.special_token_ids and token_ids[:1] == before:
            before = []  # the text begins with it already
        return before + token_ids + behind

    def encode_chat_steps(self, chat: RenderedChat, *, max_tokens: int | None = None) -> Steps[list[int]]:
        """Return, in steps, the ids of a chat. Control tokens count only where the template wrote them.

        No BOS is added, because the template writes it. Raises the errors of `encode_steps`.
        """
        yield from self._check_least(chat.shown, max_tokens)
        if chat.placeholders or self._normalizes_control_tokens:
            tokenizer, text = self._unforgeable.tokenizer, self._unforgeable.renamed(chat)
        else:
            tokenizer, text = self._tokenizer, chat.text
        return (yield from self._encode(tokenizer, text, max_tokens))

    def encode_now(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Do all the steps of `encode_steps`."""
        return finished(self.encode_steps(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens))

    def encode_chat_now(self, chat: RenderedChat, *, max_tokens: int | None = None) -> list[int]:
        """Do all the steps of `encode_chat_steps`."""
        return finished(self.encode_chat_steps(chat, max_tokens=max_tokens))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`. Ids that the tokenizer does not know have no text."""
        # As with encoding, the library's ways for batches alone release the GIL.
        [text] = self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self, *, skip_special_tokens: bool = True, shown_token_ids: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """Return a decoder for the tokens of one sequence. `shown_token_ids` are not skipped."""
        skipped = self.special_token_ids - shown_token_ids if skip_special_tokens else frozenset()
        return Detokenizer(self._tokenizer, skipped, self._texts)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact name in the vocabulary."""
        return self._tokenizer.token_to_id(token)

    def token_name(self, token_id: int) -> str | None:
        """Return the exact name of a token in the vocabulary, such as "Ġthe"; None if there is no such token."""
        return self._tokenizer.id_to_token(token_id)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token alone, for log probabilities. A part of a character is U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token stands for, also if they are a part of a character."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        if "ByteLevel" in self._decoder_kinds:
            return b"".join(BYTES_OF_CHARACTERS.get(character, character.encode()) for character in token)
        if "ByteFallback" in self._decoder_kinds and (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)):
            return bytes.fromhex(byte[1])
        if self._decoder_kinds & {"Metaspace", "Replace"}:
            return token.replace("\u2581", " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def _check_least(self, text: str, max_tokens: int | None) -> Generator[None, None, None]:
        """Raise TooManyTokens for a text that has too many tokens in any case."""
        if max_tokens is None or len(text) <= max(max_tokens, SLICE_CHARACTERS):  # encoding it is quick
            return
        least = 0.0
        for start in range(0, len(text), SLICE_CHARACTERS):
            least += self.least_tokens(_unicode(text, start, start + SLICE_CHARACTERS))
            if least > max_tokens:
                raise TooManyTokens(math.ceil(least))
            yield

    def least_tokens(self, part: str) -> float:
        """Return how much a part of a text adds to the text's least number of tokens."""
        return self._least.of(part)

    def _encode(
        self, tokenizer: tokenizers.Tokenizer, text: str, max_tokens: int | None
    ) -> Generator[None, None, list[int]]:
        token_ids: list[int] = []
        for start, end in slices(text, self._cut):
            if start == 0:
                token_ids = _encode(tokenizer, _unicode(text, 0, end))
                continue
            if max_tokens is not None and len(token_ids) > max_tokens:
                raise TooManyTokens(len(token_ids))
            yield
            # The tokenizer may treat a text's start differently: this then affects only the character before the cut.
            num_before = len(_encode(tokenizer, text[start - 1]))
            token_ids += _encode(tokenizer, _unicode(text, start - 1, end))[num_before:]
        return token_ids

    def _find_around(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer puts before and after every text."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        token_ids = self._tokenizer.encode("a", add_special_tokens=True).ids
        place = next(i for i in range(len(token_ids) + 1) if token_ids[i : i + len(plain)] == plain)
        return token_ids[:place], token_ids[place + len(plain) :]

    @cached_property
    def _unforgeable(self) -> "UnforgeableTokenizer":
        return UnforgeableTokenizer(self.path, self.control_tokens)


class UnforgeableTokenizer:
    """The same tokenizer with control tokens under secret names: their usual names are plain text."""

    def __init__(self, path: Path, control_tokens: tuple[str, ...]) -> None:
        nonce = secrets.token_hex(8)
        self._names = {token: f"<|{nonce}-{index}|>" for index, token in enumerate(control_tokens)}
        self._pattern = _any_of(control_tokens)
        content = msgspec.json.decode(_read(path))
        # The ids do not change: they are in the vocabulary, or follow it in the order of the added tokens.
        self.tokenizer = _load(msgspec.json.encode(_renamed(content, self._names)), path)

    def renamed(self, chat: RenderedChat) -> str:
        """Return the text of `chat` for this tokenizer: control tokens count, except those behind placeholders."""
        return chat.with_placeholders(self._pattern.sub(lambda match: self._names[match[0]], chat.text))


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the model's directory needs a tokenizer.json")
    try:
        return read_bounded(path, LARGEST_LIST_BYTES)
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}. {AGAIN}") from None


def _load(content: bytes, path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer, without the truncation and padding that its file may still have from training."""
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("a", add_special_tokens=True)  # some faults of a file show only when it is used
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is not an Exception, and the library raises nothing narrower
        raise ValueError(f"{path} cannot be used: {error}. {AGAIN}") from error
    return tokenizer


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """Return the ids of `text`. Of the library's encoding functions, only those for batches release the GIL."""
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    token_ids: list[int] = encoding.ids
    return token_ids


def _renamed(content: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return the tokenizer.json `content` with the tokens in `names` renamed wherever their text is looked up."""
    for token in content.get("added_tokens", ()):
        token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        merges = (merge if isinstance(merge, list) else merge.split(" ", 1) for merge in model["merges"])
        model["merges"] = [[a, b] for a, b in merges if not names.keys() & {a, b, a + b}]
    return content


def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds the longest of `texts` at each place; for no texts it finds nothing."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)")


def _unicode(text: str, start: int, end: int) -> str:
    """Return a part of `text`. Raises ValueError if it has half of a surrogate pair."""
    part = text[start:end]
    try:
        part.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not valid Unicode at character {start + error.start}") from None
    return part


def _kinds(decoder: dict[str, Any]) -> set[str]:
    """Return the type names in a decoder's description, also those inside sequences."""
    return {str(decoder.get("type"))}.union(*(_kinds(part) for part in decoder.get("decoders", ())))
