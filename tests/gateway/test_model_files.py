import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from octavo.gateway.text.chat_template import ChatTemplate, ChatTemplateError
from octavo.gateway.text.end_of_turn import end_of_turn
from octavo.gateway.text.generation_config import SamplingDefaults
from octavo.gateway.text.model_files import ModelFiles, read_model_files
from octavo.protocol.config import Config
from tests.fakes.model_directories import write_byte_level_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_byte_level_model(tmp_path / "model")


def read(directory: Path, **settings: str) -> ModelFiles:
    files = read_model_files(Config(model=str(directory), **settings))
    return files


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def chat_text(files: ModelFiles) -> str:
    return files.chat_template.render([{"role": "user", "content": "hi"}]).text


def test_the_demo_directory_is_read(demo_directory: Path) -> None:
    files = read(demo_directory)
    assert (files.eos_token_ids, files.max_position_tokens) == ((0, 2), 8192)
    assert chat_text(files).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_eos_ids_are_the_union_of_what_three_files_say(directory: Path) -> None:
    write(directory / "generation_config.json", {"eos_token_id": [7, 2]})
    assert read(directory).eos_token_ids == (7, 2, 4)  # generation_config, config, tokenizer_config


def test_a_model_without_any_end_is_warned_of(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(directory / "config.json", {})
    write(directory / "tokenizer_config.json", {})
    assert read(directory).eos_token_ids == ()
    [said] = caplog.messages
    assert f"{directory} names no token that ends an answer: answers go on to max_tokens or a stop" in said
    assert "set eos_token_id in generation_config.json" in said


def test_an_end_of_turn_that_is_no_end_is_named(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}"
    write(directory / "tokenizer_config.json", {"chat_template": template})
    assert read(directory).eos_token_ids == (2,)
    [said] = caplog.messages
    assert "ends an answer with <|im_end|> (4), which is not among the model's ends [2]: answers may go on" in said
    caplog.clear()
    write(directory / "generation_config.json", {"eos_token_id": [2, 4]})
    read(directory)
    assert caplog.messages == []


def test_a_template_that_is_not_done_in_time_is_refused() -> None:
    loops = (
        "{% for a in range(99999) %}{% for b in range(20) %}{% endfor %}{% endfor %}"  # a second, for the test's sake
    )
    with pytest.raises(ValueError, match="chat template is not done with two short messages after 0 s"):
        end_of_turn(ChatTemplate(loops, {}), ["<|im_end|>"], patience_s=0.02)


def test_a_text_model_inside_a_larger_one_is_read(directory: Path) -> None:
    write(directory / "config.json", {"text_config": {"eos_token_id": 9, "max_position_embeddings": 99}})
    files = read(directory)
    assert (files.eos_token_ids, files.max_position_tokens) == ((9, 4), 99)


def test_sampling_defaults_come_from_where_the_operator_says(directory: Path, tmp_path: Path) -> None:
    own = {"do_sample": False, "temperature": 0.7, "top_k": -1, "top_p": None, "max_new_tokens": 30}
    write(directory / "generation_config.json", own)
    write(tmp_path / "generation_config.json", {"min_p": 0.1, "repetition_penalty": 1.2})
    assert read(directory).sampling_defaults == SamplingDefaults(temperature=0.7, top_k=0, max_tokens=30)
    assert read(directory, generation_config="octavo").sampling_defaults == SamplingDefaults()
    elsewhere = read(directory, generation_config=str(tmp_path)).sampling_defaults
    assert elsewhere == SamplingDefaults(min_p=0.1, repetition_penalty=1.2)


def test_the_template_is_taken_from_where_transformers_takes_it(directory: Path) -> None:
    write(directory / "tokenizer_config.json", {"chat_template": "config"})
    assert chat_text(read(directory)) == "config"
    named = [{"name": "default", "template": "named"}, {"name": "rag", "template": "other"}]
    write(directory / "tokenizer_config.json", {"chat_template": named})
    assert chat_text(read(directory)) == "named"
    write(directory / "chat_template.json", {"chat_template": "json"})
    assert chat_text(read(directory)) == "json"
    (directory / "chat_template.jinja").write_text("jinja")
    assert chat_text(read(directory)) == "jinja"


NAMED = {"rag": "rag {{ messages[0].content }}", "tool_use": "tools {{ messages[0].content }}"}


def test_named_templates_without_a_default_are_chosen_from(directory: Path) -> None:
    for named in (NAMED, [{"name": name, "template": template} for name, template in NAMED.items()]):
        write(directory / "tokenizer_config.json", {"chat_template": named})
        with pytest.raises(ChatTemplateError, match=r"by name \(rag, tool_use\) and none by default.*--chat-template"):
            chat_text(read(directory))
        assert chat_text(read(directory, chat_template="rag")) == "rag hi"
        with pytest.raises(ValueError, match=r"no file chat.*templates: rag, tool_use"):
            read(directory, chat_template="chat")


def test_templates_in_files_of_their_own_have_the_files_names(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    for name, template in NAMED.items():
        (directory / "additional_chat_templates" / f"{name}.jinja").write_text(template)
    assert chat_text(read(directory, chat_template="tool_use")) == "tools hi"
    (directory / "chat_template.jinja").write_text("default {{ messages[0].content }}")
    assert chat_text(read(directory)) == "default hi"
    assert chat_text(read(directory, chat_template="default")) == "default hi"


def test_a_model_may_have_no_template_and_no_tokenizer_config(directory: Path) -> None:
    (directory / "tokenizer_config.json").unlink()
    files = read(directory)
    assert files.eos_token_ids == (2,)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        chat_text(files)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "{", r"config\.json is not JSON"),
        ("config.json", "[]", r"config\.json is not a JSON object"),
        ("config.json", '{"eos_token_id": "x"}', "eos_token_id 'x'"),
        ("config.json", '{"max_position_embeddings": -1}', "max_position_embeddings is -1"),
        ("config.json", '{"text_config": [1]}', r"config\.json: text_config is not a JSON object"),
        ("generation_config.json", '{"eos_token_id": 1e400}', "eos_token_id inf"),
        ("generation_config.json", '{"eos_token_id": [2, 4294967296]}', r"eos_token_id \[2, 4294967296\]"),
        ("generation_config.json", '{"eos_token_id": {"a": 1}}', "eos_token_id {'a': 1}"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat template"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "chat template"),
        ("tokenizer_config.json", '{"chat_template": ["text"]}', "the list chat_template has an entry without a name"),
        ("tokenizer_config.json", '{"chat_template": [{"template": ""}]}', "has an entry without a name"),
        ("tokenizer_config.json", '{"chat_template": {"default": 5}}', "chat template"),
        ("chat_template.jinja", "{% if %}", "chat template"),
    ],
)
def test_what_is_malformed_is_named(directory: Path, name: str, content: str, words: str) -> None:
    (directory / name).write_text(content)
    with pytest.raises(ValueError, match=words):
        read(directory)


SENSELESS = {
    "temperature": ["hot", -1, 2.5, float("nan"), True, [0.7]],
    "top_p": [7, 0, float("-inf"), {}],
    "top_k": [2**64, -2, 50.5, float("inf"), "50"],
    "min_p": [2, float("nan")],
    "repetition_penalty": [float("inf"), 0, 1e308, float("nan")],
    "max_new_tokens": [0, 2**70, 1.5, "20"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in SENSELESS.items() for value in values])
def test_a_strangers_senseless_default_is_left_out_by_name(
    key: str, value: object, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"temperature": 0.5, "top_p": 0.9} | {key: value}
    write(directory / "generation_config.json", good)
    expected = SamplingDefaults(**{name: value for name, value in good.items() if name != key})  # type: ignore[arg-type]
    assert read(directory).sampling_defaults == expected
    [said] = caplog.messages
    assert said.startswith(f"{directory}/generation_config.json: {key} is {value!r}, expected ")
    assert said.endswith(": not used")
    with pytest.raises(ValueError, match=rf"{key} is .*expected .*--generation-config octavo"):
        read(directory, generation_config=str(directory))


def test_without_generation_config_sampling_is_what_config_says(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Older models have no other file for it. What the outer model says goes before what the text model in it says."""
    inner = {"eos_token_id": 9, "temperature": 0.2, "top_p": 0.8, "min_p": 0.1}
    said = {"temperature": 0.6, "top_p": None, "top_k": 20, "repetition_penalty": 1.1, "max_new_tokens": 30}
    senseless = {"top_k": 2**64, "no_repeat_ngram_size": 3, "num_beams": 1}
    write(directory / "config.json", said | {"text_config": inner})
    expected = SamplingDefaults(temperature=0.6, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.1, max_tokens=30)
    assert read(directory).sampling_defaults == expected
    assert read(directory, generation_config="octavo").sampling_defaults == SamplingDefaults()
    assert caplog.messages == []
    write(directory / "config.json", {"eos_token_id": 2, **said, **senseless})
    assert read(directory).sampling_defaults == SamplingDefaults(temperature=0.6, repetition_penalty=1.1, max_tokens=30)
    assert caplog.messages == [
        f"{directory}/config.json: top_k is {2**64}, expected int <= 2147483647: not used",
        f"{directory}/config.json: no effect here: no_repeat_ngram_size",
    ]
    caplog.clear()
    write(directory / "generation_config.json", {"eos_token_id": 2})
    assert read(directory).sampling_defaults == SamplingDefaults()
    assert caplog.messages == []


def test_what_has_no_effect_is_named_if_it_asks_for_one(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    asks = {"no_repeat_ngram_size": 3, "suppress_tokens": [1], "num_beams": 4, "stop_strings": ["\n"]}
    quiet = {"num_beam_groups": 1, "typical_p": 1.0, "bad_words_ids": None, "do_sample": True, "pad_token_id": 0}
    write(directory / "generation_config.json", quiet)
    read(directory)
    assert not caplog.messages
    write(directory / "generation_config.json", quiet | asks)
    read(directory)
    expected = "no effect here: no_repeat_ngram_size, num_beams, stop_strings, suppress_tokens"
    assert caplog.record_tuples == [
        ("octavo.gateway.text.generation_config", logging.WARNING, f"{directory}/generation_config.json: {expected}")
    ]


PANICS = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "z", "type_id": 0}}], "pair": []}


@pytest.mark.parametrize(
    "damage",
    [
        {"post_processor": PANICS | {"special_tokens": {}}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "z"}},
        {"model": {"type": "BPE", "vocab": {"b": 0}, "merges": [], "unk_token": "z"}},
        *({"decoder": decoder} for decoder in (["Fuse"], {"type": "Sequence", "decoders": [["Fuse"]]})),
        *(
            {"pre_tokenizer": step}
            for step in (["Whitespace"], {"type": "Sequence", "pretokenizers": [["Whitespace"]]})
        ),
        {"normalizer": ["Lowercase"]},
    ],
    ids=["post_processor", "normalizer", "words", "merges", *(f"list {number}" for number in range(5))],
)
def test_a_tokenizer_that_fails_only_in_use_is_refused_at_the_start(damage: dict[str, Any], directory: Path) -> None:
    path = directory / "tokenizer.json"
    bare = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    write(path, bare | damage)
    with pytest.raises(ValueError, match=rf"{path} cannot be used: .*\. Download the model again"):
        read(directory)


def test_what_is_missing_is_named(directory: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        read(directory / "nowhere")
    with pytest.raises(ValueError, match=r"is not a directory with generation_config\.json"):
        read(directory, generation_config=str(directory))
    (directory / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        read(directory)


GIVEN_TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


@pytest.mark.parametrize("as_file", [True, False])
def test_a_chat_template_may_be_given_as_a_file_or_as_itself(directory: Path, tmp_path: Path, as_file: bool) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(GIVEN_TEMPLATE)
    assert chat_text(read(directory, chat_template=str(path) if as_file else GIVEN_TEMPLATE)) == "[hi]"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("/nowhere/mine.jinja", "chat_template: there is no file /nowhere/mine.jinja"),
        ("chatml", "there is no file chatml. Give the path of a file, or the template itself"),
        ("{% for %}", "Put right what --chat-template gives"),
    ],
)
def test_a_given_chat_template_that_cannot_be_used_stops_the_start(directory: Path, given: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        read(directory, chat_template=given)
