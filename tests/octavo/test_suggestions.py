"""What is said of a setting that does not exist: the one that was meant, or nothing rather than a silly guess."""

import pytest

from octavo.cli import build_parser, main
from protocol.config import FIELDS
from protocol.suggestions import suggestion

# Of vLLM's flags, those of which ours have one with similar letters.
WITHOUT_A_LIKENESS = [
    "--all2all-backend",
    "--api-server-count",
    "--compilation-config",
    "--config",
    "--convert",
    "--cpu-offload-gb",
    "--data-parallel-rank",
    "--disable-uvicorn-access-log",
    "--distributed-executor-backend",
    "--download-dir",
    "--enable-expert-parallel",
    "--enable-lora",
    "--enable-eplb",
    "--enable-sleep-mode",
    "--grpc-port",
    "--headless",
    "--hf-overrides",
    "--kv-cache-metrics",
    "--kv-transfer-config",
    "--language-model-only",
    "--lora-dtype",
    "--lora-modules",
    "--master-port",
    "--max-cpu-loras",
    "--max-log-len",
    "--max-lora-rank",
    "--max-num-active-seqs",
    "--max-num-queued-tokens",
    "--model-impl",
    "--model-loader-extra-config",
    "--nnodes",
    "--node-rank",
    "--override-generation-config",
    "--pooler-config",
    "--prefill-context-parallel-size",
    "--prefix-caching-hash-algo",
    "--profiler-config",
    "--reasoning-parser",
    "--revision",
    "--runner",
    "--scheduling-policy",
    "--spec-model",
    "--speculative-config",
    "--ssl-keyfile",
    "--tokenizer",
    "--tokenizer-mode",
    "--tool-call-parser",
    "-O",
    "-cc",
    "-dcp",
    "-ep",
]


@pytest.mark.parametrize("flag", WITHOUT_A_LIKENESS)
def test_nothing_is_suggested_for_what_there_is_not(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", flag, "1"])
    assert capsys.readouterr().err == f"octavo serve: unknown argument {flag}\n"


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
        ("--data-parallel-size", "one server a replica"),
    ],
)
def test_the_setting_that_was_meant_is_named(flag: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", flag, "1"])
    shown = capsys.readouterr().err
    assert f"unknown argument {flag}; " in shown
    assert said in shown


def test_a_name_from_elsewhere_is_no_hint_where_ours_is_not_known() -> None:
    assert suggestion("--max-seq-len", ["--host", "--port"]) == ""


def test_variables_and_keywords_are_named_alike() -> None:
    assert suggestion("max_num_seq", FIELDS) == "; did you mean max_num_seqs?"
    assert suggestion("OCTAVO_CONTEXT_LENGTH", ["OCTAVO_MAX_MODEL_LEN"]) == "; did you mean OCTAVO_MAX_MODEL_LEN?"


def test_tensor_parallel_size_has_its_short_flag() -> None:
    assert build_parser("serve").parse_args(["serve", "-tp", "2"]).tensor_parallel_size == "2"
