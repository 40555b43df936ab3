"""Checkpoints as torch stores them (.bin), as many older repositories have nothing else."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from octavo.protocol.model_files.weight_files import BIN_FILE, BIN_INDEX_FILE


def as_torch_files(directory: Path, num_files: int = 1) -> Path:
    """Put the tensors of a checkpoint's model.safetensors into .bin files in its place, and return the directory."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    if num_files == 1:
        torch.save(tensors, directory / BIN_FILE)
        return directory
    files = [f"pytorch_model-{i + 1:05}-of-{num_files:05}.bin" for i in range(num_files)]
    weight_map = {name: files[i % num_files] for i, name in enumerate(tensors)}
    for file in files:
        torch.save({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": weight_map}
    (directory / BIN_INDEX_FILE).write_text(json.dumps(index))
    return directory
