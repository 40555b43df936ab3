"""What each family's tokenizer adds to its file: special tokens, prefixes, ends of answers and the chat template."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from octavo.errors import ModelError
from octavo.models.convert.tokenizer import SPLITS
from octavo.models.json_files import read_object
from octavo.models.older import templates
from octavo.models.older.sentencepiece import PieceType, build_bpe, read_sentencepiece
from octavo.models.older.tiktoken import build_byte_level, has_ranks, read_ranks

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_QWEN_EXTRAS = 205
CHATGLM_TOKENS = ("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>")  # not "sop": words have such parts
CHATGLM3_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


class _AddedToken(msgspec.Struct):
    content: str


class BuiltTokenizer(NamedTuple):
    tokenizer: "Tokenizer"
    special_tokens: dict[str, str]  # by the names of tokenizer_config.json: eos_token, ...
    stop_tokens: tuple[str, ...]  # each of them ends an answer
    chat_template: str | None  # None: the checkpoint's own, if it has one


# Each builds from a checkpoint's directory and the name by which the model was asked for. Raises ModelError.


def build_qwen(directory: Path, model: str) -> BuiltTokenizer:
    """Return the first Qwen's tokenizer: ranks, then its control tokens, on text in the normal form C."""
    paths = sorted(directory.glob("*.tiktoken"))
    ranks = read_ranks(paths[0] if paths else directory / "qwen.tiktoken")
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(NUM_QWEN_EXTRAS))]
    special_tokens = {name: len(ranks) + index for index, name in enumerate(names)}
    split = SPLITS["qwen2"].regex or ""
    tokenizer = build_byte_level(ranks, special_tokens, split, normalize_nfc=True)
    is_base = read_object(directory / "generation_config.json").get("chat_format") == "raw"
    own_template = read_object(directory / "tokenizer_config.json").get("chat_template")
    eos_token = "<|endoftext|>" if is_base else "<|im_end|>"
    return BuiltTokenizer(
        tokenizer,
        {"eos_token": eos_token, "pad_token": "<|endoftext|>"},
        tuple(dict.fromkeys((eos_token, "<|endoftext|>"))),
        None if is_base or own_template else templates.QWEN,
    )


def build_chatglm(directory: Path, model: str) -> BuiltTokenizer:
    """Return the tokenizer of ChatGLM2, of ChatGLM3 or, if the file is tiktoken's, of GLM-4."""
    path = directory / "tokenizer.model"
    if path.is_file() and has_ranks(path):
        return _build_glm4(directory)
    has_roles = _is_chatglm3(directory, model)
    special_tokens = (*CHATGLM_TOKENS, *(CHATGLM3_ROLES if has_roles else ()))
    tokenizer = build_bpe(read_sentencepiece(path), special_tokens)
    _put_first(tokenizer, ["[gMASK]", "<sop>"])
    own_template = read_object(directory / "tokenizer_config.json").get("chat_template")
    default = templates.CHATGLM3 if has_roles else templates.CHATGLM2
    return BuiltTokenizer(
        tokenizer,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"},
        ("</s>", "<|user|>", "<|observation|>") if has_roles else ("</s>",),
        own_template.replace("[gMASK]sop", "[gMASK]<sop>") if isinstance(own_template, str) else default,
    )


def build_baichuan(directory: Path, model: str) -> BuiltTokenizer:
    """Return Baichuan's tokenizer. The roles of a chat are reserved pieces, whose ids generation_config.json names."""
    pieces = read_sentencepiece(directory / "tokenizer.model")
    reserved = [text for text in pieces.of_type(PieceType.USER_DEFINED) if text.startswith("<reserved_")]
    tokenizer = build_bpe(pieces, reserved)
    config = read_object(directory / "tokenizer_config.json")
    if config.get("add_bos_token", True):
        _put_first(tokenizer, ["<s>"])
    generation = read_object(directory / "generation_config.json")
    ids = [generation.get(f"{role}_token_id") for role in ("user", "assistant")]
    roles = [tokenizer.id_to_token(token_id) or "" for token_id in ids if isinstance(token_id, int)]
    has_own_template = bool(config.get("chat_template"))
    template = templates.baichuan(*roles) if len(roles) == 2 and all(roles) and not has_own_template else None
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    return BuiltTokenizer(tokenizer, special_tokens, ("</s>",), template)


def _build_glm4(directory: Path) -> BuiltTokenizer:
    """Return GLM-4's tokenizer. Its control tokens are in tokenizer_config.json."""
    config = read_object(directory / "tokenizer_config.json")
    try:
        added = msgspec.convert(config.get("added_tokens_decoder") or {}, dict[int, _AddedToken], strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(f"{directory / 'tokenizer_config.json'}, added_tokens_decoder: {error}.") from error
    special_tokens = {token.content: token_id for token_id, token in added.items()}
    if not {"[gMASK]", "<sop>", "<|endoftext|>", *CHATGLM3_ROLES} <= special_tokens.keys():
        raise ModelError(f"{directory / 'tokenizer_config.json'} lacks GLM-4's control tokens (added_tokens_decoder).")
    split = SPLITS["llama-bpe"].regex or ""
    ranks = read_ranks(directory / "tokenizer.model")
    tokenizer = build_byte_level(ranks, special_tokens, split, normalize_nfc=False)
    _put_first(tokenizer, ["[gMASK]", "<sop>"])
    template = None if config.get("chat_template") else templates.GLM4
    stops = ("<|endoftext|>", "<|user|>", "<|observation|>")
    return BuiltTokenizer(tokenizer, {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}, stops, template)


def _is_chatglm3(directory: Path, model: str) -> bool:
    """Return whether the checkpoint is ChatGLM3 and not ChatGLM2: its name says so, or it has the role tokens."""
    names = ("config.json", "tokenizer_config.json", "tokenization_chatglm.py")
    texts = [(directory / name).read_text(errors="replace") for name in names if (directory / name).is_file()]
    return any("chatglm3" in text.lower() or "<|user|>" in text for text in [model, *texts])


def _put_first(tokenizer: "Tokenizer", tokens: Sequence[str]) -> None:
    """Let `encode` put these tokens before every text."""
    from tokenizers import processors

    ids = [(token, tokenizer.token_to_id(token)) for token in tokens]
    if absent := [token for token, token_id in ids if token_id is None]:
        raise ModelError(f"the model's tokenizer file lacks {', '.join(absent)}. Download the model again.")
    tokenizer.post_processor = processors.TemplateProcessing(single=[*tokens, "$A"], special_tokens=ids)
