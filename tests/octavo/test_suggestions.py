"""What is said of a setting that does not exist: the one that was meant, or nothing rather than a silly guess."""

import re
from pathlib import Path

import pytest

from octavo import LLM
from octavo.cli import build_parser, main
from octavo.protocol.config import FIELDS
from octavo.protocol.settings.flags import flag_name
from octavo.protocol.settings.other_servers import OTHER_NAMES, SENTENCES, sentence
from octavo.protocol.settings.suggestions import setting_suggestion, suggestion

# https://docs.vllm.ai/en/latest/cli/serve/, with its short flags and the options that older guides have
VLLM_FLAGS = Path(__file__).with_name("vllm_serve_flags.txt").read_text().split()


def real_flags() -> set[str]:
    shown: list[str] = []
    for action in build_parser("serve")._actions:  # the commands are the choices of the last
        if isinstance(action.choices, dict):
            shown += action.choices["serve"]._option_string_actions
    return set(shown)


def refused(flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(["serve", flag, "1"])
    return capsys.readouterr().err


@pytest.mark.parametrize("flag", sorted(set(VLLM_FLAGS) - real_flags()))
def test_each_flag_of_vllms_that_is_none_of_ours_gets_a_sentence(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = flag.strip("-").replace("-", "_").lower()
    said = sentence(name) or f"did you mean {flag_name(OTHER_NAMES[name])}?"
    assert refused(flag, capsys) == f"octavo serve: unknown argument {flag}; {said}\n"


def test_what_there_is_has_no_sentence_that_it_is_not_there() -> None:
    real = {flag.strip("-").replace("-", "_") for flag in real_flags()} | set(FIELDS)
    assert not real & set(SENTENCES)
    assert not {flag_name(name) for name in OTHER_NAMES} & real_flags()
    assert not set(OTHER_NAMES) & set(SENTENCES)
    assert set(OTHER_NAMES.values()) <= set(FIELDS)
    assert setting_suggestion("--top_k", ["--top-k"]) == "; did you mean --top-k?"


@pytest.mark.parametrize("flag", ["--wallet", "--enable-telepathy", "--loran", "-x", "-Z9"])
def test_nothing_is_suggested_for_what_nobody_has(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(flag, capsys) == f"octavo serve: unknown argument {flag}\n"


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--max-num-seq", "did you mean --max-num-seqs?"),
        ("--max-model-length", "did you mean --max-model-len?"),
        ("--max_model_len", "did you mean --max-model-len?"),
        ("--gpu-mem-util", "did you mean --gpu-memory-utilization?"),
        ("--tensor-parallel", "did you mean --tensor-parallel-size?"),
        ("--tp", "did you mean --tensor-parallel-size?"),
        ("--apikey", "did you mean --api-key?"),
        ("--quantize", "did you mean --quantization?"),
        ("--kv-cache-type", "did you mean --kv-cache-dtype?"),
        ("--max-seq-len", "did you mean --max-model-len?"),
        ("--uvicorn-log-level", "did you mean --log-level?"),
        ("--num-gpu-blocks-override", "did you mean --kv-cache-memory-bytes?"),
        ("--swap-space", "computed again"),
        ("-pp", "divided by tensor_parallel_size only"),
        ("--data-parallel-size", "one server for each replica"),
        ("--disable-log-stats", "and not at log_level warning"),
        ("--cpu-offload-gb", "take a model of fewer bits"),
        ("--enable-expert-parallel", "runs on one device"),
        ("--enable-lora", "merge the adapter"),
        ("--enable_lora", "merge the adapter"),
        ("--no-enable-lora", "merge the adapter"),
        ("-O3", "CUDA graphs unless enforce_eager"),
        ("-cc.mode", "CUDA graphs unless enforce_eager"),
        ("--compilation-config.mode", "CUDA graphs unless enforce_eager"),
        ("--no-enable-log-requests", "at log_level debug alone"),
        ("--disable-log-requests", "at log_level debug alone"),
        ("-ngl", "all layers are on the GPU"),
        ("--n-gpu-layers", "all layers are on the GPU"),
        ("-c", "did you mean --max-model-len?"),
        ("--ctx-size", "did you mean --max-model-len?"),
        ("-t", "did you mean --num-threads?"),
        ("--mem-fraction-static", "did you mean --gpu-memory-utilization?"),
        ("--dp-size", "one server for each replica"),
        ("--scheduling-policy", "a request of many sequences takes turns with the others"),
        ("--disable-frontend-multiprocessing", "processes of their own"),
    ],
)
def test_the_setting_that_was_meant_is_named(flag: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = refused(flag, capsys)
    assert f"unknown argument {flag}; " in shown
    assert said in shown


def test_a_name_from_elsewhere_is_no_hint_where_ours_is_not_known() -> None:
    assert suggestion("--max-seq-len", ["--host", "--port"]) == ""


def test_variables_and_keywords_are_named_alike() -> None:
    assert suggestion("max_num_seq", FIELDS) == "; did you mean max_num_seqs?"
    assert suggestion("OCTAVO_CONTEXT_LENGTH", ["OCTAVO_MAX_MODEL_LEN"]) == "; did you mean OCTAVO_MAX_MODEL_LEN?"


def test_tensor_parallel_size_has_its_short_flag() -> None:
    assert build_parser("serve").parse_args(["serve", "-tp", "2"]).tensor_parallel_size == "2"


@pytest.mark.parametrize(
    ("keyword", "said"),
    [
        ("cpu_offload_gb", "take a model of fewer bits"),
        ("enable_lora", "merge the adapter"),
        ("tokenizer", "the one in the model's directory"),
        ("swap_space", "computed again"),
        ("hf_token", "set the variable HF_TOKEN"),
        ("max_seq_len_to_capture", "did you mean max_model_len?"),
    ],
)
def test_a_keyword_of_vllms_is_told_the_same_as_the_flag(keyword: str, said: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'; .*{re.escape(said)}"):
        LLM(**{keyword: 1})


def test_a_field_of_a_request_is_told_nothing_of_settings() -> None:
    assert suggestion("runner", ["messages", "model"]) == ""
