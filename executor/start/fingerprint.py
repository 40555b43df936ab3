"""A name for what a model computes: generations are resumed only where it is the same."""

import hashlib
import zipfile
from pathlib import Path

import torch

from octavo.executor.checkpoints.checkpoint import checkpoint_files
from octavo.executor.models import ModelDescription
from octavo.executor.quantization import choose_rounding
from octavo.protocol.model_files.gguf_index import GGUF_INDEX

HEADER_LENGTH_BYTES = 8


def model_fingerprint(
    directory: Path,
    config: ModelDescription,
    dtype: torch.dtype,
    *,
    max_model_len: int,
    load_format: str,
    quantization: str = "auto",
    kv_cache_dtype: str = "auto",
    seed: int = 0,
) -> str:
    """Return the sha256, in hex, of what decides a model's logits, without reading the weights themselves.

    These are config.json, the name, size and header of each file of weights (or a GGUF file's index, which has them;
    or the seed of dummy weights), the dtypes, to what plain weights are rounded, and the rotary frequencies, which may
    depend on `max_model_len`. Weights that were changed in place under the same header are not noticed. Raises
    ValueError if a file is missing or damaged.
    """
    digest = hashlib.sha256()
    rounded_bits = choose_rounding(quantization, config.quantization)
    parts = [
        (directory / "config.json").read_bytes(),
        f"{dtype} {kv_cache_dtype} {rounded_bits}".encode(),
        config.frequencies(max_model_len).encode(),
        *([f"dummy {seed}".encode()] if load_format == "dummy" else _describe_weights(directory, config)),
    ]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _describe_weights(directory: Path, config: ModelDescription) -> list[bytes]:
    if config.quantization is not None and config.quantization.method == "gguf":
        return [(directory / GGUF_INDEX).read_bytes()]
    return [_describe(path) for path in checkpoint_files(directory)]


def _describe(path: Path) -> bytes:
    """Return a file's name, size and header, or the names, sizes and checksums in torch's archive."""
    size_bytes = path.stat().st_size
    if path.suffix == ".bin":
        with zipfile.ZipFile(path) as archive:
            members = [(member.filename, member.file_size, member.CRC) for member in archive.infolist()]
        return f"{path.name} {size_bytes} {members}".encode()
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
        if header_bytes > size_bytes - HEADER_LENGTH_BYTES:
            raise ValueError(f"{path} is damaged or incomplete: its header is longer than the file")
        return f"{path.name} {size_bytes} ".encode() + file.read(header_bytes)
