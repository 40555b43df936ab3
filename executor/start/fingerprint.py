"""A name for what a model computes: a generation is resumed only on a model with the same name."""

import hashlib
import zipfile
from pathlib import Path

from octavo.executor.checkpoints.checkpoint import checkpoint_files
from octavo.executor.models import LoadPlan, ModelDescription
from octavo.executor.quantization import choose_rounding
from octavo.protocol.model_files.gguf_index import GGUF_INDEX

HEADER_LENGTH_BYTES = 8


def model_fingerprint(plan: LoadPlan, kv_cache_dtype: str = "auto") -> str:
    """Return the sha256, in hex, of everything that decides a model's logits, without reading the weights themselves.

    It covers config.json; the name, size and header of each file of weights (a GGUF file's index has them; dummy
    weights have a seed instead); the dtypes; to how many bits plain weights are rounded; and the rotary frequencies,
    which may depend on `max_model_len`. Weights that were changed in place under the same header go unnoticed. Raises
    ValueError if a file is missing or damaged.
    """
    digest = hashlib.sha256()
    rounded_bits = choose_rounding(plan.quantization, plan.config.quantization)
    is_dummy = plan.load_format == "dummy"
    parts = [
        (plan.directory / "config.json").read_bytes(),
        f"{plan.dtype} {kv_cache_dtype} {rounded_bits}".encode(),
        plan.config.frequencies(plan.max_model_len).encode(),
        *([f"dummy {plan.seed}".encode()] if is_dummy else _describe_weights(plan.directory, plan.config)),
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
