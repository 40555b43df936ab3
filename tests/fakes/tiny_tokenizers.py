"""Model directories with small tokenizers of both families, made on the spot: no weights, but all a gateway reads."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog. ", "stop now, stop here: user and system say hello. "] * 20
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


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
    return _write(directory, tokenizer)


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
    return _write(directory, tokenizer)


def _write(directory: Path, tokenizer: Tokenizer) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    files = {
        "config.json": {"model_type": "llama", "eos_token_id": 2, "max_position_embeddings": 512},
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": {"content": "<|im_end|>"},
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory
