"""A GGUF file's vocabulary as tokenizer.json.

Byte-level BPE is built here. A file only *names* how its vocabulary splits text (`tokenizer.ggml.pre`), and a wrong
split makes answers worse without an error. So a name that is not in SPLITS is refused. SentencePiece
vocabularies are built by transformers, which recovers their merges.
"""

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.errors import ModelError
from octavo.models.convert.ends import NAMES as END_NAMES
from octavo.models.convert.ends import end_token_ids
from octavo.models.convert.metadata import Count, GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer, pre_tokenizers


SPACE = "\u2581"  # as SentencePiece spells it
NAMED_TEMPLATE = "tokenizer.chat_template."


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, as far as it matters here."""

    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


class Split(NamedTuple):
    """How a family of vocabularies prepares text, in the order in which it happens."""

    normalize_nfc: bool = False
    digits_alone: bool = False  # one digit at a time, before anything else
    regex: str | None = None  # None is GPT-2's own
    ignore_merges: bool = False  # a word that is a token becomes that token, whatever the merges say
    add_bos: bool = False  # for files that do not say it


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_SPLIT = Split()
_DIGITS_SPLIT = Split(digits_alone=True)
_LLAMA3_SPLIT = Split(regex=rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", ignore_merges=True, add_bos=True)
_QWEN2_SPLIT = Split(regex=rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", normalize_nfc=True)

# The names are llama.cpp's (`llm_tokenizer_bpe` in src/llama-vocab.cpp); the splits are the original tokenizers'.
SPLITS = {
    "gpt-2": _GPT2_SPLIT,
    "smollm": _DIGITS_SPLIT,
    "starcoder": _DIGITS_SPLIT,
    "refact": _DIGITS_SPLIT,
    "codeshell": _DIGITS_SPLIT,
    "command-r": _DIGITS_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": Split(regex=_TEKKEN, ignore_merges=True, add_bos=True),
}


def build_tokenizer(file: GGUFFile) -> "Tokenizer":
    """The tokenizer that the file describes. Raises ModelError if its kind or its split is unknown."""
    match file.require("tokenizer.ggml.model", str):
        case "gpt2":
            return _byte_level_bpe(file, _split(file))
        case "llama":
            return _sentencepiece(file)
        case other:
            raise ModelError(f"{file.path} has the tokenizer {other!r}; supported: gpt2 (byte-level BPE), llama.")


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """The content of tokenizer_config.json: the special tokens' text and the chat template."""
    config: dict[str, Any] = dict(special_tokens(file))
    if templates := _chat_templates(file):
        named = [{"name": name, "template": template} for name, template in templates.items()]
        config["chat_template"] = named if templates.keys() != {"default"} else templates["default"]
    return config | {
        "add_bos_token": _adds_bos(file),
        "add_eos_token": file.get("tokenizer.ggml.add_eos_token", bool, False),
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.require(f"{file.architecture}.context_length", Count),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _chat_templates(file: GGUFFile) -> dict[str, str]:
    """Return the chat templates by name; the one without a name is the default."""
    keys = {key: key.removeprefix(NAMED_TEMPLATE) for key in file.keys if key.startswith(NAMED_TEMPLATE)}
    templates = {name: file.require(key, str) for key, name in keys.items()}
    default = file.get("tokenizer.chat_template", str)
    return templates if default is None else {**templates, "default": default}


def _split(file: GGUFFile) -> Split:
    name = file.get("tokenizer.ggml.pre", str)
    if name not in SPLITS:
        raise ModelError(
            f"{file.path} does not say how its vocabulary splits text in a way known here (tokenizer.ggml.pre is "
            f"{name!r}; known: {', '.join(SPLITS)}), and a guess would degrade its answers. "
            "Give the model's Hugging Face id or directory instead."
        )
    return SPLITS[name]


def _byte_level_bpe(file: GGUFFile, split: Split) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, types = _tokens(file), token_types(file)
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED}
    merges = _merges(file, vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.ignore_merges))
    if split.normalize_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, types)
    _set_post_processor(tokenizer, file)
    return tokenizer


def _merges(file: GGUFFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in file.require("tokenizer.ggml.merges", list[str]):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise ModelError(f"{file.path} merges {merge!r}, which its vocabulary lacks: the file is damaged.")
        merges.append((left, right))
    return merges


def _pre_tokenizer(split: Split) -> "pre_tokenizers.PreTokenizer":
    from tokenizers import Regex, pre_tokenizers

    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.digits_alone:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(split.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None))
    return pre_tokenizers.Sequence(steps)


def _sentencepiece(file: GGUFFile) -> "Tokenizer":
    from transformers import AutoTokenizer

    token_types(file)  # transformers would say less about a damaged file
    try:
        loaded = AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
    except Exception as error:  # metadata can be a stranger's, and transformers checks only a part of it
        cause = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{file.path} has a tokenizer (llama) that cannot be converted: {cause}.") from error
    tokenizer: Tokenizer = loaded.backend_tokenizer
    if not file.get("tokenizer.ggml.add_space_prefix", bool, True):
        _take_space_prefix_out(tokenizer)
    _set_post_processor(tokenizer, file)
    return tokenizer


def _take_space_prefix_out(tokenizer: "Tokenizer") -> None:
    """Add no space before a text. transformers would put one before every text."""
    from tokenizers import decoders, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])


def _add_tokens(tokenizer: "Tokenizer", tokens: list[str], types: list[int]) -> None:
    """Mark control tokens as special, and keep user-defined ones whole."""
    from tokenizers import AddedToken

    def of_type(wanted: TokenType) -> list[AddedToken]:
        special = wanted == TokenType.CONTROL
        return [
            AddedToken(token, normalized=False, special=special)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == wanted
        ]

    tokenizer.add_special_tokens(of_type(TokenType.CONTROL))
    tokenizer.add_tokens(of_type(TokenType.USER_DEFINED))


def _tokens(file: GGUFFile) -> list[str]:
    return list(file.require("tokenizer.ggml.tokens", list[str]))


def special_tokens(file: GGUFFile) -> dict[str, str]:
    """The text of the special tokens that chat templates see, by its name in tokenizer_config.json."""
    tokens = _tokens(file)
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {key: file.token_id(name) for key, name in ids.items()}
    return {key: tokens[token_id] for key, token_id in found.items() if token_id is not None}


def end_ids(file: GGUFFile) -> list[int]:
    """The ids of all tokens that end an answer."""
    tokens = _tokens(file)
    control = [token for token, kind in zip(tokens, token_types(file), strict=True) if kind == TokenType.CONTROL]
    return end_token_ids(file, tokens, special_tokens(file), control)


def token_types(file: GGUFFile) -> list[int]:
    """Each token's type. A token that ends an answer is a control token, even if the file calls it a word."""
    types, num_tokens = list(file.require("tokenizer.ggml.token_type", list[int])), len(_tokens(file))
    if len(types) != num_tokens:
        raise ModelError(f"{file.path} is damaged: it has {num_tokens} tokens, but types of {len(types)}.")
    is_end = [token in END_NAMES for token in _tokens(file)]
    return [
        TokenType.CONTROL if ends and kind != TokenType.UNUSED else kind
        for kind, ends in zip(types, is_end, strict=True)
    ]


def _adds_bos(file: GGUFFile) -> bool:
    """Whether the model expects its first token to be BOS: as the file says, else as llama.cpp assumes."""
    stated: bool | None = file.get("tokenizer.ggml.add_bos_token", bool)
    if stated is not None:
        return stated
    return file.get("tokenizer.ggml.model", str) == "llama" or _split(file).add_bos


def _set_post_processor(tokenizer: "Tokenizer", file: GGUFFile) -> None:
    """Let `encode` add BOS and EOS where the model expects them, and nowhere else."""
    from tokenizers import processors

    tokens = _tokens(file)
    adds_eos = file.get("tokenizer.ggml.add_eos_token", bool, False)
    bos, eos = file.token_id("bos"), file.token_id("eos")
    before = [(tokens[bos], bos)] if bos is not None and _adds_bos(file) else []
    after = [(tokens[eos], eos)] if eos is not None and adds_eos else []

    def around(part: str) -> list[str]:
        return [*(token for token, _ in before), part, *(token for token, _ in after)]

    tokenizer.post_processor = processors.TemplateProcessing(
        single=around("$A"), pair=[*around("$A"), *around("$B:1")], special_tokens=before + after
    )
