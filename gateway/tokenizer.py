"""Text to token ids and single tokens back to text."""

from pathlib import Path

from gateway.chat_template import RenderedChat


class Tokenizer:
    """The model's tokenizer.json. Encoding runs in threads of its own, away from the event loop."""

    def __init__(self, directory: Path) -> None:
        """Raises ValueError if `directory` has no usable tokenizer.json."""
        self.num_tokens = 0  # ids are below this
        self.special_token_ids: frozenset[int] = frozenset()

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a raw prompt: control tokens in it count, and the tokenizer's own BOS is added once.

        Raises ValueError if `text` is not valid Unicode.
        """
        raise ValueError

    async def encode_chat(self, chat: RenderedChat) -> list[int]:
        """Return the ids of a rendered chat: control tokens count where the template wrote them, nowhere else.

        Raises ValueError if the text is not valid Unicode.
        """
        raise ValueError

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        raise ValueError

    def token_text(self, token_id: int) -> str:
        """Return the text of one token alone, as log probabilities name it; a part of a character is U+FFFD."""
        raise ValueError

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token stands for, also if they are a part of a character."""
        raise ValueError

    def close(self) -> None:
        """End the threads."""
