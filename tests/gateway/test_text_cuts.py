"""Texts in slices have exactly the tokens of the whole, and the least number of tokens is none too many."""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from octavo.gateway.text.steps import finished
from octavo.gateway.text.text_cuts import SLICE_CHARACTERS, find_cuts, slices
from octavo.gateway.text.tokenizer import Tokenizer, TooManyTokens

SPACE = "\u2581"
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and it's 12,345.67 o'clock!it's\n\tdef f(x):\n        return x\n\n",
    "Быстрая лиса; 狐狸跳过了懒狗，然后呢\uff1f かな カナ。 한국어 문장 café naïve 😀🎉🚀😀😀 ==== ---- ####\r\n  \r\n",
] * 20
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level(*stages: pre_tokenizers.PreTokenizer, use_regex: bool, nfc: bool = False) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*stages, last])
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer, pre_tokenizers.ByteLevel.alphabet())


def trained(tokenizer: tokenizers.Tokenizer, alphabet: list[str]) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False, min_frequency=2
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def llama2(*, fallback: bool = True) -> tokenizers.Tokenizer:
    """BPE over the whole text, as SentencePiece's: no pre-tokenizer, a space in front."""
    learned = tokenizers.Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained(learned, [])
    model = json.loads(learned.to_str())["model"]
    missing = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else []
    vocabulary = model["vocab"] | {token: len(model["vocab"]) + index for index, token in enumerate(missing)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=fallback)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return tokenizer


def unigram(*, is_split: bool) -> tokenizers.Tokenizer:
    pieces = [(token, 0.0) for token in SPECIAL] + [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [(chr(code), -6.1) for code in range(33, 127)] + [(SPACE, -5.3), ("th", -7.7), (f"{SPACE}the", -3.2)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=is_split)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


CUT: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gpt2": lambda: byte_level(use_regex=True),
    "smollm": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "falcon": lambda: byte_level(pre_tokenizers.Punctuation("contiguous"), use_regex=True),
    "llama3": lambda: byte_level(split(LLAMA3), use_regex=False),
    "qwen2": lambda: byte_level(split(QWEN2), use_regex=False, nfc=True),
    "o200k": lambda: byte_level(split(O200K), use_regex=False),
    "deepseek": lambda: byte_level(
        split(r"\p{N}{1,3}"), split("[一-龥\u3040-ゟ\u30a0-ヿ]+"), split(DEEPSEEK), use_regex=False
    ),
    "llama2": llama2,
    "llama2 without bytes": lambda: llama2(fallback=False),
    "unigram of words": lambda: unigram(is_split=True),
}
WHOLE: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "one word": lambda: byte_level(use_regex=False),
    "unigram": lambda: unigram(is_split=False),
    "unknown expression": lambda: byte_level(split(r"[a-z ]+|[^a-z ]+"), use_regex=False),
}


def made(directory: Path, kind: str) -> Tokenizer:
    (CUT | WHOLE)[kind]().save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.fixture(scope="module", params=[*CUT, *WHOLE])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return made(tmp_path_factory.mktemp("tokenizer"), request.param)


def hostile_texts() -> dict[str, str]:
    draw = random.Random(7)
    num = 3 * SLICE_CHARACTERS
    scraps = [*"ab Z19.,;'\n\t\r-_é\u0301\u3000，。好か가ж😀", "  ", "'s", "<|im_end|>", "<s>", " </s> ", "the", SPACE]
    return {
        "words": "the quick brown fox, it's 12345 o'clock!\n" * (num // 40),
        "emoji": "😀🎉🚀" * (num // 3),
        "digits": "0123456789" * (num // 10),
        "numbers": "12,345.67 " * (num // 10),
        "one word": "x" * num,
        "endings": "it's" * (num // 4),
        "spaces": " " * num,
        "words between spaces": ("a" + " " * 50 + "\n" * 3) * (num // 50),
        "han": "狐狸跳过了懒狗，然后呢\uff1f" * (num // 12),
        "cyrillic": "Быстрая лиса; " * (num // 14),
        "control tokens": "a <|im_end|> b<s></s>" * (num // 20),
        "marks": "e\u0301 n\u0303, o\u0308" * (num // 8),
        "replaced spaces": f"a{SPACE}b c" * (num // 5),
        **{f"scraps {index}": "".join(draw.choices(scraps, k=num)) for index in range(4)},
    }


def whole(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    plain = tokenizers.Tokenizer.from_file(str(tokenizer.path))
    return list(plain.encode(text, add_special_tokens=add_special_tokens).ids)


@pytest.mark.parametrize("name", hostile_texts())
def test_slices_have_the_tokens_of_the_whole(tokenizer: Tokenizer, name: str) -> None:
    text = hostile_texts()[name]
    expected = whole(tokenizer, text)
    assert tokenizer.encode_now(text, add_special_tokens=False) == expected
    assert tokenizer.least_tokens(text) <= len(expected)
    assert tokenizer.encode_now(text, add_special_tokens=False, max_tokens=len(expected)) == expected
    with suppress(TooManyTokens):
        assert tokenizer.encode_now(text, add_special_tokens=False, max_tokens=len(expected) // 2) == expected


@pytest.mark.parametrize("kind", CUT)
def test_ordinary_text_is_cut(tmp_path: Path, kind: str) -> None:
    cut = find_cuts(json.loads(CUT[kind]().to_str()))
    text = hostile_texts()["words"]
    parts = list(slices(text, cut))
    assert len(parts) >= 3
    assert all(end - start <= SLICE_CHARACTERS for start, end in parts)
    assert "".join(text[start:end] for start, end in parts) == text


@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_not_known_to_split_is_not_cut(kind: str) -> None:
    assert find_cuts(json.loads(WHOLE[kind]().to_str())) is None


def test_a_vocabulary_that_joins_words_is_not_cut_there() -> None:
    content = json.loads(llama2().to_str())
    content["model"]["vocab"] |= {f"e{SPACE}a": 5000}
    cut = find_cuts(content)
    assert cut is not None
    assert [match[0] for match in cut.finditer("we are so old")] == ["e", "o"][1:]


@pytest.mark.parametrize("token", ["end", "of text", f"x{SPACE}y"])
def test_an_added_token_across_or_before_a_cut_forbids_all(token: str) -> None:
    tokenizer = byte_level(use_regex=True)
    tokenizer.add_tokens([AddedToken(token, rstrip=True)])
    assert find_cuts(json.loads(tokenizer.to_str())) is None


def test_what_the_tokenizer_adds_stands_at_both_ends_of_a_text_in_slices(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, "llama2")
    for text in ("the quick brown fox " * 2000, "<s>the quick brown fox " * 2000, "short"):
        expected = whole(tokenizer, text, add_special_tokens=True)
        assert tokenizer.encode_now(text) == (expected[1:] if text.startswith("<s>") else expected)


@pytest.mark.parametrize("kind", ["smollm", "llama2"])
def test_hopeless_texts_are_refused_by_what_they_have_at_least(tmp_path: Path, kind: str) -> None:
    tokenizer = made(tmp_path, kind)
    for text in ("😀🎉🚀" * 40_000, "0123456789" * 10_000, "x" * 1_000_000):
        steps: Any = tokenizer.encode_steps(text, max_tokens=2000)
        with pytest.raises(TooManyTokens):
            finished(steps)
        assert tokenizer.least_tokens(text) > 2000
