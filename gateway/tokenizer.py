"""Text to token ids, and token ids back to text."""

import asyncio
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from gateway.byte_level import BYTES_OF_CHARACTERS
from gateway.chat_template import RenderedChat
from gateway.detokenizer import Detokenizer
from protocol.model_json import LARGEST_LIST_BYTES, read_bounded

NUM_THREADS = 4


class Tokenizer:
    """The model's tokenizer.json. Encoding runs in threads of its own, away from the event loop."""

    def __init__(self, directory: Path) -> None:
        """Raises ValueError if `directory` has no usable tokenizer.json."""
        self._path = directory / "tokenizer.json"
        content = _read(self._path)
        self._tokenizer = _load(content, self._path)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in added.items() if token.special}
        self.special_token_ids = frozenset(special)
        self.control_tokens = tuple(token.content for token in special.values())
        self._added = {token_id: token.content for token_id, token in added.items()}
        # A normalizer could turn other text into a control token: then no chat is encoded the short way.
        self._normalizes_control_tokens = self._tokenizer.normalizer is not None and any(
            token.normalized for token in special.values()
        )
        self._bos_id = self._find_bos()
        self._decoder_kinds = _kinds(msgspec.json.decode(content, type=_Described).decoder or {})
        # Bytes follow one another, and nothing else is done to them: only a character that is cut has neighbours.
        self._texts: dict[int, str] | None = {} if self._decoder_kinds == {"ByteLevel"} else None
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a raw prompt: control tokens in it count, and the tokenizer's own BOS is added once.

        Raises ValueError if `text` is not valid Unicode.
        """
        return await self._in_thread(self.encode_now, text, add_special_tokens)

    async def encode_chat(self, chat: RenderedChat) -> list[int]:
        """Return the ids of a rendered chat: control tokens count where the template wrote them, nowhere else.

        No BOS is added: the template writes it. Raises ValueError if the text is not valid Unicode.
        """
        return await self._in_thread(self.encode_chat_now, chat)

    def encode_now(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Do what `encode` does, in this thread."""
        _check_unicode(text)
        token_ids = _encode(self._tokenizer, text, add_special_tokens=add_special_tokens)
        if add_special_tokens and self._bos_id is not None and token_ids[:2] == [self._bos_id, self._bos_id]:
            del token_ids[0]  # the text began with it
        return token_ids

    def encode_chat_now(self, chat: RenderedChat) -> list[int]:
        """Do what `encode_chat` does, in this thread."""
        _check_unicode(chat.text)
        if not chat.placeholders and not self._normalizes_control_tokens:
            return _encode(self._tokenizer, chat.text, add_special_tokens=False)
        return self._unforgeable.encode(chat)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; ids that the tokenizer does not have, have none."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a decoder for the tokens of one sequence."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        return Detokenizer(self._tokenizer, skipped, self._texts)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact name in the vocabulary."""
        return self._tokenizer.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token alone, as log probabilities name it; a part of a character is U+FFFD."""
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

    def close(self) -> None:
        """End the threads; what they were asked for is done first."""
        self._threads.shutdown()

    async def _in_thread(self, function: Any, *arguments: Any) -> list[int]:
        result: list[int] = await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        return result

    def _find_bos(self) -> int | None:
        """Return the id that the tokenizer puts before every text, if it does."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        token_ids = self._tokenizer.encode("a", add_special_tokens=True).ids
        return token_ids[0] if token_ids and token_ids[0] in self.special_token_ids and token_ids != plain else None

    @cached_property
    def _unforgeable(self) -> "UnforgeableTokenizer":
        return UnforgeableTokenizer(self._path, self.control_tokens)


class UnforgeableTokenizer:
    """The same tokenizer with control tokens under names that nobody can guess: their usual names are plain text."""

    def __init__(self, path: Path, control_tokens: tuple[str, ...]) -> None:
        nonce = secrets.token_hex(8)
        self._names = {token: f"<|{nonce}-{index}|>" for index, token in enumerate(control_tokens)}
        self._pattern = _any_of(control_tokens)
        content = msgspec.json.decode(_read(path))
        # The ids stay: they are in the vocabulary, or follow it in the order of the added tokens.
        self._tokenizer = _load(msgspec.json.encode(_renamed(content, self._names)), path)

    def encode(self, chat: RenderedChat) -> list[int]:
        """Return the ids of `chat`: outside the placeholders control tokens count, inside they are text."""
        text = self._pattern.sub(lambda match: self._names[match[0]], chat.text)
        if chat.placeholders:
            text = _any_of(tuple(chat.placeholders)).sub(lambda match: chat.placeholders[match[0]], text)
        return _encode(self._tokenizer, text, add_special_tokens=False)


class _Described(msgspec.Struct):
    """The part of a tokenizer.json that tells how bytes are spelled."""

    decoder: dict[str, Any] | None = None


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the model's directory needs a tokenizer.json")
    try:
        return read_bounded(path, LARGEST_LIST_BYTES)
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}. Download the model again") from None


def _load(content: bytes, path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer, without the truncation and padding of its training, which its file may still hold."""
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("a", add_special_tokens=True)  # what a file lacks may show only then
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of errors nothing narrower is raised; a panic of Rust is no Exception
        raise ValueError(f"{path} cannot be used: {error}. Download the model again") from error
    return tokenizer


def _encode(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the ids of `text`. Of the library's ways to encode, only those of batches release the GIL."""
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    token_ids: list[int] = encoding.ids
    return token_ids


def _renamed(content: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return the tokenizer.json `content` with the tokens `names` renamed wherever their text would be looked up."""
    for token in content["added_tokens"]:
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
    """Return a pattern that finds the longest of `texts` at each place; without any, one that finds nothing."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)")


def _check_unicode(text: str) -> None:
    """Raise ValueError if `text` has half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not valid Unicode at character {error.start}") from None


def _kinds(decoder: dict[str, Any]) -> set[str]:
    """Return the type names in a decoder's description, those inside sequences included."""
    return {str(decoder.get("type"))}.union(*(_kinds(part) for part in decoder.get("decoders", ())))
