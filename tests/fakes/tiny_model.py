"""A model directory without weights: a byte-level tokenizer of 1,024 tokens, a chat template, a generation config.

Ids 0 to 2 are control tokens, 3 to 258 the bytes, and the rest the words " w259" to " w1023". Text is encoded byte by
byte, so a test knows every id; the words come only from what a scheduler generates.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END, IM_START, IM_END = 0, 1, 2
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_BYTE, FIRST_WORD, VOCAB_SIZE = 3, 259, 1024

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and message['content'] == 'refuse' %}{{ raise_exception('no such system') }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_id(byte: int) -> int:
    return FIRST_BYTE + byte


def text_ids(text: str) -> list[int]:
    """Return the ids of plain text."""
    return [byte_id(byte) for byte in text.encode()]


def write_tiny_model(directory: Path, **generation_config: object) -> Path:
    """Write the model into `directory` and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    spelled = _byte_alphabet()
    vocab = {CONTROL_TOKENS[i]: i for i in range(3)}
    vocab |= {spelled[byte]: byte_id(byte) for byte in range(256)}
    vocab |= {f"{spelled[32]}w{token_id}": token_id for token_id in range(FIRST_WORD, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write(directory / "config.json", model_type="llama", max_position_embeddings=8192, eos_token_id=IM_END)
    _write(directory / "generation_config.json", eos_token_id=IM_END, **generation_config)
    _write(
        directory / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )
    return directory


def _byte_alphabet() -> list[str]:
    """Return the character by which byte-level tokenizers spell each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [spelled[byte] for byte in range(256)]


def _write(path: Path, **content: object) -> None:
    path.write_text(json.dumps(content))
