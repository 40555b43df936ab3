"""Every key of a GGUF file that changes text, ends or tensors is read, or refused by name."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer

from octavo.errors import ModelError
from octavo.models.convert import convert_gguf
from octavo.models.convert.keys import HARMLESS, NEUTRAL, NO_SAMPLING, READ
from tests.fakes.tiny_gguf import HIDDEN_SIZE, NUM_HEADS, tiny_model, write_gguf


def converted(tmp_path: Path, *, architecture: str = "llama", sentencepiece: bool = False, **keys: Any) -> Path:
    model = tiny_model(architecture, **({"vocab_size": 271} if sentencepiece else {}))
    path = write_gguf(tmp_path / "tiny.gguf", model, sentencepiece=sentencepiece, **keys)
    directory = path.with_suffix("")
    convert_gguf(path, directory)
    return directory


def read(directory: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / name).read_text())
    return content


def constants(group: type) -> list[str]:
    """Return the keys that a class of the `gguf` package names, those of classes inside it too."""
    found: list[str] = []
    for name, value in vars(group).items():
        if isinstance(value, str) and not name.startswith("__"):
            found.append(value)
        elif isinstance(value, type):
            found += constants(value)
    return found


def test_the_tables_speak_of_keys_that_exist() -> None:
    """A misspelt key would be read, or refused, in no file."""
    keys = gguf.constants.Keys
    known = {key.replace("{arch}", "ARCH") for key in constants(keys)} | {
        *("ARCH.rope.scale_linear", "tokenizer.ggml.cls_token_id", "tokenizer.ggml.normalizer.lowercase"),
        *("tokenizer.ggml.added_tokens",),
    }
    assert {key for key in (*READ, *NEUTRAL) if key not in known} == set()
    assert READ.isdisjoint(NEUTRAL)
    plain = {key for key in (*HARMLESS, *NO_SAMPLING) if "*" not in key}
    assert plain <= known


def test_every_key_of_the_tokenizer_and_of_general_is_in_a_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = gguf.constants.Keys
    named = [*constants(keys.General), *constants(keys.Tokenizer), *constants(keys.Split)]
    unread = [key.format(id=0, name="rag") for key in named if key not in READ | NEUTRAL.keys()]
    unread = [key for key in unread if not key.startswith("general.sampling.")]
    converted(tmp_path, **{key.replace(".", "__"): "" if key.endswith(".rag") else 0 for key in unread})
    assert caplog.messages == []


WRONG = {
    "llama.attention.sliding_window": 100,
    "llama.attention.causal": False,
    "llama.attention.scale": 0.5,
    "llama.attention.value_length": 16,
    "llama.attention.clamp_kqv": 8.0,
    "llama.attention.max_alibi_bias": 8.0,
    "llama.attn_logit_softcapping": 50.0,
    "llama.final_logit_softcapping": 30.0,
    "llama.logit_scale": 0.5,
    "llama.embedding_scale": 12.0,
    "llama.residual_scale": 0.22,
    "llama.use_parallel_residual": True,
    "llama.pooling_type": 3,
    "llama.expert_count": 8,
    "llama.rope.dimension_sections": [16, 24, 24, 0],
    "llama.rope.scaling.attn_factor": 1.2,
    "llama.rope.scaling.yarn_log_multiplier": 0.1,
    "llama.rope.freq_base_swa": 10000.0,
    "general.type": "adapter",
    "general.quantization_version": 1,
    "tokenizer.ggml.normalizer.lowercase": True,
    "tokenizer.ggml.add_sep_token": True,
}


@pytest.mark.parametrize("key", WRONG)
def test_a_key_that_means_what_is_not_done_is_refused_by_name(key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refusal:
        converted(tmp_path, **{key.replace(".", "__"): WRONG[key]})
    named = {
        "llama.attention.value_length": "it has" not in str(refusal.value) and "values of 16 and keys of 32",
        "llama.expert_count": "mixture of experts",
    }
    assert str(named.get(key, f"has {key} ")) in str(refusal.value)
    assert not (tmp_path / "tiny").exists()


def test_values_that_change_nothing_pass(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    same = {
        "llama__attention__sliding_window": 512,  # as long as the context
        "llama__attention__scale": 32**-0.5,
        "llama__attention__value_length": 32,
        "llama__logit_scale": 1.0,
        "llama__rope__scaling__attn_factor": 1.0,
        "llama__expert_count": 0,
        "llama__expert_used_count": 0,
        "llama__vocab_size": 272,
        "general__quantization_version": 2,
        "split__count": 1,
        "split__no": 0,
        "quantize__imatrix__file": "x",
    }
    converted(tmp_path, **same)
    assert caplog.messages == []


def test_keys_that_nobody_knows_are_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = {"llama__attention__swirl": 1, "tokenizer__ggml__vowels": True, "general__sampling__mirostat": 2, "x": 1}
    converted(tmp_path, **keys)
    [said] = caplog.messages
    assert said == (
        f"{tmp_path}/tiny.gguf has keys that are not known here, and have no effect: general.sampling.mirostat, "
        "llama.attention.swirl, tokenizer.ggml.vowels, x"
    )


def test_recommended_sampling_is_kept(tmp_path: Path) -> None:
    named = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}
    directory = converted(tmp_path, **{f"general__sampling__{key}": value for key, value in named.items()})
    said = read(directory, "generation_config.json")
    assert {name: said[name] for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")} == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }


def test_named_chat_templates_are_kept(tmp_path: Path) -> None:
    directory = converted(
        tmp_path, tokenizer__chat_templates=["rag"], tokenizer__chat_template__rag="rag {{ messages }}"
    )
    [rag, default] = read(directory, "tokenizer_config.json")["chat_template"]
    assert rag == {"name": "rag", "template": "rag {{ messages }}"}
    assert default["name"] == "default"
    assert "im_start" in default["template"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),  # as llama.cpp takes it
        ({"type": "linear", "factor": 1.0}, None),
        ({"type": "none", "factor": 4.0}, None),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0},
        ),
    ],
)
def test_scaling_of_rotary_frequencies_is_read(keys: dict[str, Any], expected: object, tmp_path: Path) -> None:
    directory = converted(tmp_path, **{f"llama__rope__scaling__{key}": value for key, value in keys.items()})
    assert read(directory, "config.json")["rope_scaling"] == expected


def test_the_old_key_of_linear_scaling_is_read(tmp_path: Path) -> None:
    directory = converted(tmp_path, llama__rope__scale_linear=2.0)
    assert read(directory, "config.json")["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(("add", "tokens"), [(True, ["<s>", "▁hello"]), (False, ["<s>", "hello"])])
def test_a_space_before_a_text_is_what_the_file_says(add: bool, tokens: list[str], tmp_path: Path) -> None:
    directory = converted(tmp_path, sentencepiece=True, tokenizer__ggml__add_space_prefix=add)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == tokens
    for text in ["hello w"] if add else ["hello w", " hello"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", vocab_size=100))
    with pytest.raises(ModelError, match="it has 269 tokens, and embeddings of 100"):
        convert_gguf(path, tmp_path / "tiny")


# Ids of the tiny vocabulary: 0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|>.


def ends(directory: Path) -> list[int]:
    said = read(directory, "generation_config.json").get("eos_token_id", [])
    return said if isinstance(said, list) else [said]


@pytest.mark.parametrize("eos", [0, None])
def test_the_token_that_ends_turns_ends_an_answer_whatever_eos_is(eos: int | None, tmp_path: Path) -> None:
    keys = {} if eos is None else {"tokenizer__ggml__eos_token_id": eos}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), eos=False, **keys)
    convert_gguf(path, tmp_path / "tiny")
    assert ends(tmp_path / "tiny") == [0, 2]


def test_a_control_token_that_the_template_puts_behind_an_answer_ends_it(tmp_path: Path) -> None:
    """Whatever its name is."""
    vocabulary = {"<|im_end|>": "<|over|>"}
    template = "{% for m in messages %}<|im_start|>{{ m.content }}\n<|over|>\n{% endfor %}"
    path = write_gguf(
        tmp_path / "tiny.gguf",
        tiny_model("llama"),
        renamed=vocabulary,
        eos=False,
        tokenizer__ggml__eos_token_id=0,
        tokenizer__chat_template=template,
    )
    convert_gguf(path, tmp_path / "tiny")
    assert ends(tmp_path / "tiny") == [0, 2]


def test_a_file_that_names_no_end_at_all_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    renamed = {"<|im_end|>": "<|a|>", "<|endoftext|>": "<|b|>"}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = write_gguf(
        tmp_path / "tiny.gguf", tiny_model("llama"), renamed=renamed, eos=False, tokenizer__chat_template=template
    )
    convert_gguf(path, tmp_path / "tiny")
    assert ends(tmp_path / "tiny") == []
    [said] = caplog.messages
    assert "names no token that ends an answer, and none is known" in said


def test_an_end_that_the_file_calls_a_word_is_a_control_token(tmp_path: Path) -> None:
    types = [1, 3, 1]
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), control_types=types)
    convert_gguf(path, tmp_path / "tiny")
    added = Tokenizer.from_file(str(tmp_path / "tiny" / "tokenizer.json")).get_added_tokens_decoder()
    assert [added[token_id].special for token_id in (0, 1, 2)] == [True, True, True]


def test_sentencepiece_without_ids_has_those_of_llama(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf", tiny_model("llama", vocab_size=271), sentencepiece=True, eos=False, bos=False
    )
    convert_gguf(path, tmp_path / "tiny")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tiny" / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["<s>", "▁hello"]
    assert ends(tmp_path / "tiny") == [2]


def test_a_terminal_obeys_no_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    converted(tmp_path, **{"llama__x\x1b]0;title\x07\n12:00:00 I octavo: all is well": 1})
    [said] = caplog.messages
    assert said.isprintable()


def test_heads_that_cannot_share_their_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"attn_q.weight has \d+ rows, which 147 heads cannot share"):
        converted(tmp_path, llama__attention__head_count=147, llama__attention__key_length=HIDDEN_SIZE // NUM_HEADS)
