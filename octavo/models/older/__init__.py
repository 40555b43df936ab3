"""Tokenizers and chat templates of models in older guides. These came as Python code, and are built here without it.

Baichuan and ChatGLM have a SentencePiece model, the first Qwen and GLM-4 ranks in tiktoken's format. This package has
what their code does to text beyond that, and how it writes a chat.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.gateway.text.generation_config import said_in_config
from octavo.models.json_files import read_object, write_object
from octavo.models.older.families import BuiltTokenizer, build_baichuan, build_chatglm, build_qwen

FAMILIES: dict[str, Callable[[Path, str], BuiltTokenizer]] = {
    "BaiChuanForCausalLM": build_baichuan,
    "BaichuanForCausalLM": build_baichuan,
    "ChatGLMForConditionalGeneration": build_chatglm,
    "ChatGLMModel": build_chatglm,
    "QWenLMHeadModel": build_qwen,
}
# keys of tokenizer_config.json for code that is not run
DROPPED = ("auto_map", "tokenizer_class", "added_tokens_decoder")


def is_older(config: dict[str, Any]) -> bool:
    """Whether the architecture of this config.json is one of this package: served natively, its code never run."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in FAMILIES


def write_tokenizer(directory: Path, target: Path, model: str) -> None:
    """Write what a gateway reads of the older checkpoint in `directory` to `target`: its tokenizer and template.

    `model` is the name by which it was asked for. A chat template that the checkpoint has is kept. Raises ModelError
    for a file that is missing or damaged.
    """
    config = read_object(directory / "config.json")
    [architecture] = config["architectures"]
    built = FAMILIES[architecture](directory, model)
    built.tokenizer.save(str(target / "tokenizer.json"))
    said = {k: v for k, v in read_object(directory / "tokenizer_config.json").items() if k not in DROPPED}
    own_class = {"tokenizer_class": "PreTrainedTokenizerFast"}
    write_object(target / "tokenizer_config.json", said | built.special_tokens | own_class)
    if built.chat_template is not None and not (directory / "chat_template.jinja").is_file():
        (target / "chat_template.jinja").write_text(built.chat_template, encoding="utf-8")
    path = directory / "generation_config.json"
    generation = read_object(path) if path.is_file() else said_in_config(config, {})
    stops = _ids(directory, generation.get("eos_token_id")) + [
        built.tokenizer.token_to_id(token) for token in built.stop_tokens
    ]
    write_object(target / "generation_config.json", generation | {"eos_token_id": list(dict.fromkeys(stops))})


def _ids(directory: Path, said: Any) -> list[int]:
    ids = said if isinstance(said, list) else [] if said is None else [said]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ModelError(f"{directory / 'generation_config.json'} has an eos_token_id that is no number: {said!r}.")
    return ids
