"""A GGUF file's tensors by the names of a checkpoint, and as one bf16 safetensors file, one in memory at a time."""

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError
from octavo.models.convert.header import StoredTensor
from octavo.models.convert.metadata import GGUFFile

if TYPE_CHECKING:
    import numpy as np

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
# Read elsewhere: config.json's rope_scaling says the same.
NOT_WEIGHTS = {"rope_freqs.weight"}
NUM_BYTES_BF16 = 2


@dataclass(frozen=True)
class Weight:
    """One tensor to convert: `name` and `shape` are the checkpoint's, `source` is its place in `file`."""

    name: str
    shape: tuple[int, ...]
    source: StoredTensor
    file: Path
    interleaved_heads: int | None  # llama.cpp stores each head's rows of Llama's q and k in another order

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * NUM_BYTES_BF16

    def read(self) -> "np.ndarray":
        """The values, float32 `[*shape]`."""
        values = read_tensor(self.file, self.source)
        return values if self.interleaved_heads is None else deinterleave(values, self.interleaved_heads)


def plan_weights(file: GGUFFile, config: dict[str, Any]) -> list[Weight]:
    """The tensors of the model. Raises ModelError if one is missing or left over."""
    names = _checkpoint_names(config)
    missing = names.keys() - file.tensors.keys()
    left_over = file.tensors.keys() - names.keys() - NOT_WEIGHTS
    if missing or left_over:
        found = [f"it lacks {name}" for name in sorted(missing)] + [f"it has {name}" for name in sorted(left_over)]
        raise ModelError(
            f"{file.path} is not a {file.architecture} model that can be read: {', '.join(found[:5])}. "
            "Give the model's Hugging Face id or directory instead."
        )
    heads = _interleaved_heads(file.architecture, config)
    return [_plan(file, gguf_name, name, heads) for gguf_name, name in names.items()]


def write_safetensors(path: Path, weights: list[Weight], title: str) -> None:
    """Write `weights` as bf16 and show progress. The format: a length, a JSON header of offsets, the data."""
    from gguf import GGMLQuantizationType, quantize
    from tqdm import tqdm

    header = _header(weights)
    num_bytes = sum(weight.num_bytes for weight in weights)
    if not sys.stderr.isatty():
        print(f"{title} ({num_bytes / 1e6:.0f} MB)", file=sys.stderr, flush=True)  # the text of the progress bar
    with (
        path.open("wb") as file,
        tqdm(total=num_bytes, desc=title, unit="B", unit_scale=True, disable=None) as progress,
    ):
        file.write(len(header).to_bytes(8, "little") + header)
        for weight in weights:
            file.write(quantize(weight.read(), GGMLQuantizationType.BF16).tobytes())
            progress.update(weight.num_bytes)
        file.flush()
        os.fsync(file.fileno())


def deinterleave(rows: "np.ndarray", num_heads: int) -> "np.ndarray":
    """Undo llama.cpp's order of rotary rows, `[num_heads * head_dim, ...]` to the same shape.

    Llama's checkpoints rotate row i with row i + head_dim/2 of a head; llama.cpp rotates neighbours, so its
    converter (`LlamaModel.permute` in convert_hf_to_gguf.py) has moved the pairs together.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def read_tensor(path: Path, tensor: StoredTensor) -> "np.ndarray":
    """The values of a GGUF file's tensor, float32 `[*shape]`."""
    import numpy as np
    from gguf import GGMLQuantizationType, dequantize

    rows = math.prod(tensor.shape[:-1]), tensor.num_bytes // math.prod(tensor.shape[:-1])
    stored = np.memmap(path, mode="r", offset=tensor.offset_bytes, shape=rows)
    values: np.ndarray = dequantize(stored, GGMLQuantizationType[tensor.type]).reshape(tensor.shape)
    return values


def _checkpoint_names(config: dict[str, Any]) -> dict[str, str]:
    """GGUF name -> checkpoint name of every tensor that a model of this configuration has."""
    outer = dict(OUTER)
    if config["tie_word_embeddings"]:
        del outer["output"]
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in outer.items()}
    layer = LAYER | (QK_NORM if config["model_type"] == "qwen3" else {})
    biased = _biased_layers(config)
    for i in range(config["num_hidden_layers"]):
        for ours, theirs in layer.items():
            names[f"blk.{i}.{ours}.weight"] = f"model.layers.{i}.{theirs}.weight"
            if ours in biased:
                names[f"blk.{i}.{ours}.bias"] = f"model.layers.{i}.{theirs}.bias"
    return names


def _biased_layers(config: dict[str, Any]) -> tuple[str, ...]:
    if config["model_type"] == "qwen2":
        return ("attn_q", "attn_k", "attn_v")
    return ("attn_q", "attn_k", "attn_v", "attn_output") if config["attention_bias"] else ()


def _interleaved_heads(architecture: str, config: dict[str, Any]) -> dict[str, int]:
    if architecture != "llama":
        return {}
    return {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}


def _plan(file: GGUFFile, gguf_name: str, name: str, heads: dict[str, int]) -> Weight:
    source = file.tensors[gguf_name]
    num_heads = heads.get(gguf_name.split(".")[-2])
    if num_heads is not None and source.shape[0] % (2 * num_heads):
        raise ModelError(
            f"{file.path} cannot be read: its tensor {gguf_name} has {source.shape[0]} rows, which {num_heads} heads"
            " cannot share. Download it again."
        )
    return Weight(name, source.shape, source, file.path, num_heads)


def _header(weights: list[Weight]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight in weights:
        end = offset + weight.num_bytes
        header[weight.name] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    return encoded + b" " * (-len(encoded) % 8)  # the data starts at a multiple of 8
