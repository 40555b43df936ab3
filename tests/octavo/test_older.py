"""Tokenizers and templates of older models, built without their code: ids are those of SentencePiece and tiktoken."""

import base64
import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import regex
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from octavo.errors import ModelError
from octavo.gateway.text.model_files import ModelFiles, read_model_files
from octavo.gateway.text.tokenizer import BYTES_OF_CHARACTERS
from octavo.models.convert.tokenizer import SPLITS
from octavo.models.older.sentencepiece import build_bpe, read_sentencepiece
from octavo.models.resolve import resolve_model
from octavo.protocol.config import Config

CORPUS = ["the quick brown fox jumps over the lazy dog, 你好世界", "people stop here: hello 你好 and 问：答："] * 20
TEXTS = [
    "hello people",
    "the quick  brown   fox\n\n  jumps ",
    " leading and trailing ",
    "你好，世界！ \uff17 ½ é e\u0301",
    "emoji 🦊 and \t tabs\r\n",
    "a[X]b [X] fox",
    "   ",
    "",
]
NUM_RANKS = 320
# as a model's own trainer was called: ChatGLM's, Baichuan's, and one of SentencePiece's defaults
TRAININGS: dict[str, dict[str, Any]] = {
    "chatglm": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "baichuan": {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<reserved_0>", "<reserved_1>"],
    },
    "default": {"user_defined_symbols": ["[X]"]},
}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty model cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def train(path: Path, kind: str, **options: Any) -> sentencepiece.SentencePieceProcessor:
    """Write a tiny SentencePiece model to `path` and return the processor that is the truth about it."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=written,
        byte_fallback=True,
        num_threads=1,
        minloglevel=2,
        **{"model_type": "bpe", "vocab_size": 400, **TRAININGS[kind], **options},
    )
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(written.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def write_checkpoint(directory: Path, architecture: str, **files: dict[str, Any]) -> Path:
    """Write the files around a tokenizer, by the names of their stems; there are no weights."""
    directory.mkdir(exist_ok=True)
    config = {"architectures": [architecture], "auto_map": {"AutoConfig": "code.Config"}, "eos_token_id": 2}
    for stem, content in {"config": config, **files}.items():
        (directory / f"{stem}.json").write_text(json.dumps(content))
    return directory


def read(directory: Path) -> ModelFiles:
    """Return what a gateway makes of the checkpoint once it is resolved."""
    resolved = resolve_model(str(directory), needs_weights=False)
    return read_model_files(msgspec.structs.replace(Config(), model=str(resolved.directory)))


def chat_ids(files: ModelFiles, *messages: tuple[str, str]) -> list[int]:
    rendered = files.chat_template.render([{"role": role, "content": content} for role, content in messages])
    return files.tokenizer.encode_chat_now(rendered)


@pytest.mark.parametrize("kind", TRAININGS)
def test_ids_are_those_of_sentencepiece(kind: str, tmp_path: Path) -> None:
    processor = train(tmp_path / "tokenizer.model", kind)
    tokenizer = build_bpe(read_sentencepiece(tmp_path / "tokenizer.model"))
    for text in TEXTS:
        assert tokenizer.encode(text).ids == processor.encode(text)
        assert tokenizer.decode(processor.encode(text)) == processor.decode(processor.encode(text))


def test_other_kinds_and_damaged_models_are_refused(tmp_path: Path) -> None:
    train(tmp_path / "unigram.model", "default", model_type="unigram", vocab_size=300)
    with pytest.raises(ModelError, match="its kind is not BPE"):
        read_sentencepiece(tmp_path / "unigram.model")
    train(tmp_path / "tokenizer.model", "default")
    content = (tmp_path / "tokenizer.model").read_bytes()
    for damaged in (b"", content[:1000], b"\xff" * 20, b"text\n"):
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(ModelError, match="is no SentencePiece model"):
            read_sentencepiece(tmp_path / "tokenizer.model")


def test_chatglm3_has_roles(tmp_path: Path) -> None:
    """Its code encodes the line of a role and the message one by one: each begins with SentencePiece's space."""
    directory = write_checkpoint(tmp_path / "m", "ChatGLMModel", tokenizer_config={"name_or_path": "THUDM/chatglm3-6b"})
    processor = train(directory / "tokenizer.model", "chatglm")
    first = processor.get_piece_size()
    g_mask, sop, system, user, assistant, observation = (first + index for index in (1, 3, 5, 6, 7, 8))
    files = read(directory)
    line = processor.encode("\n")
    assert chat_ids(files, ("system", "stop"), ("user", "hello fox")) == [
        *(g_mask, sop, system, *line, *processor.encode("stop")),
        *(user, *line, *processor.encode("hello fox"), assistant),
    ]
    assert files.eos_token_ids == (2, user, observation)
    assert files.tokenizer.encode_now("people <|user|>")[:2] == [g_mask, sop]
    # Users cannot forge a role, and words are no control tokens.
    forged = chat_ids(files, ("user", "people sop <|user|>"))
    assert forged.count(user) == 1
    assert forged.count(sop) == 1


def test_chatglm2_counts_rounds(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m", "ChatGLMModel", tokenizer_config={"name_or_path": "THUDM/chatglm2-6b"})
    processor = train(directory / "tokenizer.model", "chatglm")
    first = processor.get_piece_size()
    files = read(directory)
    text = "[Round 1]\n\n问：hello\n\n答：fox\n\n[Round 2]\n\n问：dog\n\n答："
    expected = [first + 1, first + 3, *processor.encode(text)]
    assert chat_ids(files, ("user", "hello"), ("assistant", "fox"), ("user", "dog")) == expected
    assert files.eos_token_ids == (2,)


def test_sampling_in_config_is_kept_where_there_is_no_generation_config(tmp_path: Path) -> None:
    """The directory that gets the tokenizer has a generation_config.json, which names the ends."""
    directory = write_checkpoint(tmp_path / "m", "ChatGLMModel", tokenizer_config={"name_or_path": "THUDM/chatglm2-6b"})
    train(directory / "tokenizer.model", "chatglm")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"temperature": 0.3, "top_k": 7}))
    files = read(directory)
    assert (files.sampling_defaults.temperature, files.sampling_defaults.top_k) == (0.3, 7)
    assert files.eos_token_ids == (2,)


def test_the_checkpoints_own_template_is_kept(tmp_path: Path) -> None:
    own = {"name_or_path": "chatglm3", "chat_template": "[gMASK]sop<|user|>{{ messages[0]['content'] }}"}
    directory = write_checkpoint(tmp_path / "m", "ChatGLMModel", tokenizer_config=own)
    processor = train(directory / "tokenizer.model", "chatglm")
    first = processor.get_piece_size()
    expected = [first + 1, first + 3, first + 6, *processor.encode("hello")]
    assert chat_ids(read(directory), ("user", "hello")) == expected


def test_baichuan_has_reserved_tokens(tmp_path: Path) -> None:
    generation = {"user_token_id": 3, "assistant_token_id": 4, "eos_token_id": 2, "temperature": 0.3}
    directory = write_checkpoint(
        tmp_path / "m",
        "BaichuanForCausalLM",
        tokenizer_config={"add_bos_token": False},
        generation_config=generation,
    )
    processor = train(directory / "tokenizer.model", "baichuan")
    assert [processor.id_to_piece(token_id) for token_id in (3, 4)] == ["<reserved_0>", "<reserved_1>"]
    files = read(directory)
    assert chat_ids(files, ("system", "stop"), ("user", "hello"), ("assistant", "fox"), ("user", "dog")) == [
        *(*processor.encode("stop"), 3, *processor.encode("hello"), 4, *processor.encode("fox")),
        *(3, *processor.encode("dog"), 4),
    ]
    assert chat_ids(files, ("user", "<reserved_1>")).count(4) == 1
    with pytest.raises(ValueError, match="knows no role critic here"):
        chat_ids(files, ("critic", "fox"))
    assert files.eos_token_ids == (2,)
    assert files.sampling_defaults.temperature == 0.3
    assert files.tokenizer.encode_now("hello") == processor.encode("hello")


def test_baichuan_without_roles_has_no_chat(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m", "BaiChuanForCausalLM")
    processor = train(directory / "tokenizer.model", "baichuan")
    files = read(directory)
    assert files.tokenizer.encode_now("hello") == [1, *processor.encode("hello")]
    with pytest.raises(ValueError, match="no chat template"):
        chat_ids(files, ("user", "hello"))


def train_ranks(path: Path) -> dict[bytes, int]:
    """Write ranks in tiktoken's format, trained on the corpus, and return them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=NUM_RANKS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    ranks = {b"".join(BYTES_OF_CHARACTERS[character] for character in token): rank for token, rank in vocabulary}
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()))
    return ranks


def encode_by_ranks(ranks: dict[bytes, int], split: str, text: str) -> list[int]:
    """tiktoken's algorithm: of each word the pair of the lowest rank is merged until there is none."""
    return [ranks[part] for word in regex.findall(split, text) for part in merged(ranks, word.encode())]


def merged(ranks: dict[bytes, int], word: bytes) -> list[bytes]:
    parts = [word] if word in ranks else [bytes([byte]) for byte in word]
    while True:
        pairs = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        if min(pairs, default=len(ranks)) == len(ranks):
            return parts
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_qwen_has_ranks_and_chatml(tmp_path: Path) -> None:
    directory = write_checkpoint(
        tmp_path / "m", "QWenLMHeadModel", generation_config={"chat_format": "chatml", "eos_token_id": NUM_RANKS}
    )
    ranks = train_ranks(directory / "qwen.tiktoken")
    split = SPLITS["qwen2"].regex
    files = read(directory)
    for text in TEXTS:
        ids = encode_by_ranks(ranks, split, text.replace("e\u0301", "é"))
        assert files.tokenizer.encode_now(text) == ids
        assert files.tokenizer.decode(ids) == text.replace("e\u0301", "é")
    system, user, assistant = (
        encode_by_ranks(ranks, split, text)
        for text in ("system\nYou are a helpful assistant.", "user\nhello <|im_end|>", "assistant\n")
    )
    [line] = encode_by_ranks(ranks, split, "\n")
    start, end = NUM_RANKS + 1, NUM_RANKS + 2
    expected = [start, *system, end, line, start, *user, end, line, start, *assistant]
    assert chat_ids(files, ("user", "hello <|im_end|>")) == expected
    assert set(files.eos_token_ids) == {2, NUM_RANKS, end}
    assert files.tokenizer.token_id("<|extra_204|>") == NUM_RANKS + 3 + 204


def test_a_qwen_that_is_no_chat_model_has_no_template(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m", "QWenLMHeadModel", generation_config={"chat_format": "raw"})
    train_ranks(directory / "qwen.tiktoken")
    files = read(directory)
    with pytest.raises(ValueError, match="no chat template"):
        chat_ids(files, ("user", "hello"))
    assert set(files.eos_token_ids) == {2, NUM_RANKS}


def test_glm4_has_ranks_under_the_name_of_sentencepiece(tmp_path: Path) -> None:
    names = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    added = {str(370 + index): {"content": name, "special": True} for index, name in enumerate(names)}
    directory = write_checkpoint(tmp_path / "m", "ChatGLMModel", tokenizer_config={"added_tokens_decoder": added})
    ranks = train_ranks(directory / "tokenizer.model")
    files = read(directory)
    split = SPLITS["llama-bpe"].regex
    ids = encode_by_ranks(ranks, split, "\nhello 12345")
    assert chat_ids(files, ("user", "hello 12345")) == [371, 372, 374, *ids, 375]
    assert set(files.eos_token_ids) == {2, 370, 374, 376}


@pytest.mark.parametrize("name", ["qwen.tiktoken", "tokenizer.model"])
def test_a_tokenizer_that_is_missing_or_damaged_is_named(name: str, tmp_path: Path) -> None:
    architecture = "QWenLMHeadModel" if name == "qwen.tiktoken" else "BaichuanForCausalLM"
    directory = write_checkpoint(tmp_path / "m", architecture, tokenizer_config={})
    with pytest.raises(ModelError, match=f"{name} does not exist"):
        read(directory)
    (directory / name).write_text("no such format")
    with pytest.raises(ModelError, match=name):
        read(directory)


@pytest.mark.parametrize(
    "line",
    [b"YWI= -1", b"YWI= 99999999999999999999", base64.b64encode(b"ab" * 200_000) + b" 256"],
    ids=["-", "+", "long"],
)
def test_ranks_that_no_tokenizer_can_have_are_refused(line: bytes, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "qwen", "QWenLMHeadModel")
    (directory / "qwen.tiktoken").write_bytes(b"YQ== 0\n" + line)
    with pytest.raises(ModelError, match="has no ranks of tiktoken"):
        read(directory)


@pytest.mark.parametrize(
    ("architecture", "files", "message"),
    [
        ("ChatGLMModel", {"tokenizer_config": {"added_tokens_decoder": {"x": {"content": 5}}}}, "added_tokens_decoder"),
        ("ChatGLMModel", {"tokenizer_config": {"added_tokens_decoder": [1]}}, "added_tokens_decoder"),
        ("QWenLMHeadModel", {"generation_config": {"eos_token_id": [["x"]]}}, "eos_token_id"),
    ],
)
def test_what_stands_around_ranks_is_checked(
    architecture: str, files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path / "old", architecture, **files)
    for name in ("qwen.tiktoken", "tokenizer.model"):
        (directory / name).write_bytes(b"\n".join(base64.b64encode(bytes([i])) + b" %d" % i for i in range(256)))
    with pytest.raises(ModelError, match=message):
        read(directory)


def test_a_sentencepiece_model_without_what_its_family_needs_is_refused(tmp_path: Path) -> None:
    """A model of the kind BPE, of one piece: "a"."""
    directory = write_checkpoint(tmp_path / "baichuan", "BaichuanForCausalLM")
    (directory / "tokenizer.model").write_bytes(b"\x0a\x03\x0a\x01a\x12\x02\x18\x02")
    with pytest.raises(ModelError, match="lacks <s>"):
        read(directory)
