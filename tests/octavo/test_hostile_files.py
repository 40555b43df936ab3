"""A model's files may be a stranger's: what they announce is refused soon, in one sentence, before it is believed."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.errors import ModelError
from octavo.executor.checkpoints.gguf import read_index
from octavo.executor.models import read_model_config
from octavo.gateway.text.model_files import read_model_files
from octavo.models.convert.header import read_header
from octavo.models.resolve import resolve_model
from octavo.protocol.config import Config
from octavo.protocol.model_files.bounded import LARGEST_BYTES, LARGEST_LIST_BYTES
from tests.fakes.commands import start
from tests.fakes.model_directories import write_byte_level_model
from tests.fakes.raw_gguf import ARCHITECTURE, ARRAY, STRING, UINT8, UINT32, array, gguf_bytes, key, tensor, text
from tests.fakes.safetensors_files import NO_TENSORS
from tests.fakes.tiny_gguf import tiny_model, write_gguf

DEADLINE_S = 60.0  # of a command whose refusal takes a second or two
END = "bytes end before what its header announces, or are damaged"
NESTED = array(ARRAY, 1) * 99_999 + array(UINT8, 1, b"\0")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pull_refusal(path: Path) -> str:
    with start("octavo", "pull", str(path)) as process:
        try:
            _, said = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 1
    return str(said)


def test_an_array_larger_than_its_file_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "array.gguf"
    path.write_bytes(gguf_bytes([ARCHITECTURE, key("a", ARRAY, array(UINT8, 2**40))]))
    assert len(path.read_bytes()) == 94
    assert f"is not a whole GGUF file: its 94 {END}" in pull_refusal(path)


def test_arrays_in_arrays_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "nested.gguf"
    path.write_bytes(gguf_bytes([ARCHITECTURE, key("a", ARRAY, NESTED)]))
    assert "it has arrays of arrays, which no key has" in pull_refusal(path)


HEADERS = {
    "a key's name beyond the file": (gguf_bytes([text("a", 2**63)], num_keys=1), END),
    "a string beyond the file": (gguf_bytes([key("a", STRING, text("b", 2**64 - 1))]), END),
    "an array of fewer elements, but more than there are": (gguf_bytes([key("a", ARRAY, array(UINT32, 99))]), END),
    "strings that are not there": (gguf_bytes([key("a", ARRAY, array(STRING, 3_000_000))]), END),
    "two arrays of many elements": (
        gguf_bytes([key(name, ARRAY, array(UINT8, 2_500_000, bytes(2_500_000))) for name in "ab"]),
        "its arrays have more than 4,000,000 elements",
    ),
    "more keys than bytes": (gguf_bytes(num_keys=2**64 - 1), "there is no room for 18446744073709551615 keys"),
    "more tensors than bytes": (gguf_bytes(num_tensors=2**40), "there is no room for 1099511627776 tensors"),
    "a type that nobody knows": (gguf_bytes([key("a", 77, b"")]), "a value of type 77"),
    "a key twice": (gguf_bytes([ARCHITECTURE, ARCHITECTURE]), "it has 'general.architecture' twice"),
    "a tensor twice": (gguf_bytes([], [tensor("t", [1])] * 2), "it has 't' twice"),
    "a dimension beyond 64 bits of bytes": (gguf_bytes([], [tensor("t", [2**63, 2**63])]), "its tensor t is to end at"),
    "dimensions whose product is 0 in 64 bits": (gguf_bytes([], [tensor("t", [2**32, 2**32])]), "t is to end at byte"),
    "a dimension of nothing": (gguf_bytes([], [tensor("t", [0, 4])]), "its tensor t has the shape [4, 0]"),
    "a row that is no whole block": (gguf_bytes([], [tensor("t", [33], 8)]), "the shape [33], which Q8_0 cannot have"),
    "many dimensions": (gguf_bytes([], [tensor("t", [1] * 5)]), "its tensor t has 5 dimensions"),
    "more dimensions than bytes": (gguf_bytes([], [text("t") + b"\xff" * 20]), "has 4294967295 dimensions"),
    "an offset beyond the file": (gguf_bytes([], [tensor("t", [1], offset=2**40)]), "its tensor t is to end at byte"),
    "an offset that wraps around": (gguf_bytes([], [tensor("t", [1], offset=2**64 - 32)]), "t is to end at byte"),
    "an offset that is not aligned": (gguf_bytes([], [tensor("t", [1], offset=1)]) + bytes(99), END),
    "tensors that overlap": (
        gguf_bytes([], [tensor("t", [16]), tensor("u", [16], offset=32)]) + bytes(999),
        "its tensors t and u overlap",
    ),
    "a tensor's type that nobody knows": (gguf_bytes([], [tensor("t", [1], 9999)]), "has the type 9999"),
    "an alignment of nothing": (gguf_bytes([key("general.alignment", UINT32, bytes(4))]), "general.alignment is 0"),
    "an alignment that is a text": (gguf_bytes([key("general.alignment", STRING, text("x"))]), "general.alignment is"),
    "another byte order": (b"GGUF\0\0\0\3" + bytes(16), "is a GGUF file for machines of the other byte order"),
    "a version to come": (gguf_bytes(version=4), "is of version 4 of the GGUF format; versions 2 and 3 are read"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_cannot_be_true_is_refused_with_the_cause(name: str, tmp_path: Path) -> None:
    content, cause = HEADERS[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as refusal:
        resolve_model(str(path))
    assert str(refusal.value).startswith(f"{path} is ")
    assert cause in str(refusal.value)


def test_a_header_is_no_longer_than_headers_are(tmp_path: Path) -> None:
    """Also of a file with room for more: one without data, which takes no place on the disk."""
    path = tmp_path / "sparse.gguf"
    path.write_bytes(gguf_bytes([key("a", STRING, text("", 2**33))]))
    with path.open("r+b") as file:
        file.truncate(2**34)
    with pytest.raises(ModelError, match=END):
        read_header(path)


@pytest.mark.parametrize(
    "damage",
    [
        {"header_bytes": 2**60},
        {"tensors": {"a": {"type": "F32", "shape": [-1, 2**60], "offset_bytes": 0}}},
        {"tensors": {"a": {"type": "F32", "shape": [1], "offset_bytes": -(2**60)}}},
        {"tensors": {"a": {"type": "F32", "shape": [1], "offset_bytes": 0, "interleaved_heads": 0}}},
    ],
    ids=repr,
)
def test_an_index_of_a_gguf_file_that_cannot_be_true_is_refused(damage: dict[str, object], tmp_path: Path) -> None:
    directory = resolve_model(str(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama")))).directory
    index_path = directory / "model.gguf.index.json"
    index_path.write_text(json.dumps(json.loads(index_path.read_text()) | damage))
    with pytest.raises(ValueError, match=f"{index_path} is not an index of a GGUF file"):
        read_index(directory)


def sparse(path: Path, num_bytes: int) -> None:
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(num_bytes)


def nested(path: Path, num_bytes: int) -> None:
    path.write_text('{"weight_map": ' + "[" * 100_000 + "]" * 100_000 + "}")


# Told by its size and not by its content, which is not read: nothing but zeros is no JSON either.
SAID = {sparse: "it has more than [0-9,]+ bytes", nested: ""}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = write_byte_level_model(tmp_path / "model")
    (directory / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (directory / "model.safetensors").write_bytes(NO_TENSORS)
    return directory


@pytest.mark.parametrize("write", [sparse, nested])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_small_file_of_absurd_size_or_nesting_stops_a_pull(
    name: str, write: Callable[[Path, int], None], checkpoint: Path
) -> None:
    write(checkpoint / name, LARGEST_LIST_BYTES + 1)
    with pytest.raises(ModelError, match=f"{checkpoint / name}.*{SAID[write]}"):
        resolve_model(str(checkpoint))


@pytest.mark.parametrize("write", [sparse, nested])
def test_an_executor_refuses_a_config_of_absurd_size_or_nesting(
    write: Callable[[Path, int], None], checkpoint: Path
) -> None:
    write(checkpoint / "config.json", LARGEST_BYTES + 1)
    with pytest.raises(ValueError, match=f"{checkpoint / 'config.json'}.*{SAID[write]}"):
        read_model_config(checkpoint)


@pytest.mark.parametrize("write", [sparse, nested])
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"],
)
def test_a_gateway_refuses_files_of_absurd_size_or_nesting(
    name: str, write: Callable[[Path, int], None], checkpoint: Path
) -> None:
    write(checkpoint / name, LARGEST_LIST_BYTES + 1)
    with pytest.raises(ValueError, match=f"{checkpoint / name}.*{SAID[write]}"):
        read_model_files(Config(model=str(checkpoint)))


def test_a_chat_template_of_absurd_size_is_refused(checkpoint: Path) -> None:
    sparse(checkpoint / "chat_template.jinja", LARGEST_BYTES + 1)
    with pytest.raises(ValueError, match=r"chat_template\.jinja is no chat template: it has more than"):
        read_model_files(Config(model=str(checkpoint)))


SAFETENSORS = {
    "a header beyond the file": (2**40).to_bytes(8, "little") + b"{}",
    "a header that is nested": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "an offset beyond 64 bits": b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, %d]}}' % (2**70),
    "offsets that run backwards": b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [9, -9]}}',
    "an offset that is a text": b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": ["0", "1"]}}',
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_a_safetensors_header_that_cannot_be_true_is_refused(name: str, checkpoint: Path) -> None:
    content = SAFETENSORS[name]
    header = content if content[:1] != b"{" else len(content).to_bytes(8, "little") + content
    (checkpoint / "model.safetensors").write_bytes(header)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        resolve_model(str(checkpoint))
