"""Model directories without weights, made on the spot: a tokenizer, a chat template and configs, all a gateway reads.

`tiny` spells text byte by byte, so that a test knows every id; the other two are trained, one of each family.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

# Of the tiny model: 0 to 2 are control tokens, 3 to 258 the bytes, and the rest the words " w259" to " w1023".
# The words come only from what a scheduler generates.
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
IM_END, FIRST_BYTE, FIRST_WORD, VOCAB_SIZE = 2, 3, 259, 1024
REFUSING_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and message['content'] == 'refuse' %}{{ raise_exception('no such system') }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Of the trained ones.
CORPUS = ["the quick brown fox jumps over the lazy dog. ", "stop now, stop here: user and system say hello. "] * 20
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def text_ids(text: str) -> list[int]:
    """Return the tiny model's ids of plain text."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def write_tiny_model(directory: Path, *, more_control_tokens: Sequence[str] = (), **generation_config: object) -> Path:
    """Write a byte-level BPE without merges, and what `generation_config` says, into `directory` and return it.

    `more_control_tokens` have the ids from VOCAB_SIZE on.
    """
    spelled = _byte_alphabet()
    vocab = {token: token_id for token_id, token in enumerate([*CONTROL_TOKENS, *spelled])}
    vocab |= {f"{spelled[32]}w{token_id}": token_id for token_id in range(FIRST_WORD, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    control_tokens = [*CONTROL_TOKENS, *more_control_tokens]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control_tokens])
    config = {"model_type": "llama", "max_position_embeddings": 8192, "eos_token_id": IM_END}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": REFUSING_CHAT_TEMPLATE,
    }
    _write(directory, tokenizer, config, tokenizer_config)
    _write_json(directory / "generation_config.json", {"eos_token_id": IM_END, **generation_config})
    return directory


def write_byte_level_model(directory: Path) -> Path:
    """Write a byte-level BPE of some 400 tokens that adds no BOS by itself, as GPT-2's family has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _write_trained(directory, tokenizer)


def write_metaspace_model(directory: Path) -> Path:
    """Write a Unigram model with byte fallback that puts <s> first, as SentencePiece's family has."""
    words = sorted({f"\u2581{word}" for line in CORPUS for word in line.split()})
    letters = [chr(code) for code in range(33, 127)]
    pieces = [(token, 0.0) for token in SPECIAL_TOKENS]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [("\u2581", -5.0), *((letter, -6.0) for letter in letters), *((word, -3.0) for word in words)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return _write_trained(directory, tokenizer)


def _byte_alphabet() -> list[str]:
    """Return the character by which byte-level tokenizers spell each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [spelled[byte] for byte in range(256)]


def _write_trained(directory: Path, tokenizer: Tokenizer) -> Path:
    config = {"model_type": "llama", "eos_token_id": 2, "max_position_embeddings": 512}
    tokenizer_config = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHAT_TEMPLATE}
    return _write(directory, tokenizer, config, tokenizer_config)


def _write(
    directory: Path, tokenizer: Tokenizer, config: dict[str, object], tokenizer_config: dict[str, object]
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "config.json", config)
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    return directory


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content))
