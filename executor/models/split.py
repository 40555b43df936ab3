"""Among how many ranks a model can be split."""

from octavo.executor.models.config import ARCHITECTURES, ModelConfig
from octavo.executor.models.interface import ModelDescription

LARGEST_NAMED = 16  # ranks


def num_kv_heads_of_rank(num_kv_heads: int, world_size: int) -> int:
    """Return how many KV heads each rank holds; with fewer heads than ranks, several ranks hold the same one.

    Raises ValueError if the ranks cannot have equally many.
    """
    if max(num_kv_heads, world_size) % min(num_kv_heads, world_size):
        raise ValueError(f"num_key_value_heads ({num_kv_heads}) cannot be divided among {world_size} ranks")
    return max(1, num_kv_heads // world_size)


def possible_sizes(config: ModelConfig) -> list[int]:
    """Return the numbers of ranks, up to 16, that the model can be split among."""
    return [size for size in range(1, LARGEST_NAMED + 1) if not _obstacle(config, size)]


def check_size(config: ModelDescription, size: int) -> None:
    """Raise ValueError, naming the possible sizes, if the model cannot be split among `size` ranks."""
    if not isinstance(config, ModelConfig):
        if size > 1:
            raise ValueError(
                f"tensor_parallel_size cannot be {size}: {config.architecture} runs through transformers' modelling"
                f" code, which cannot be split; only these can: {', '.join(ARCHITECTURES)}"
            )
    elif obstacle := _obstacle(config, size):
        sizes = [str(possible) for possible in possible_sizes(config)]
        named = " or ".join([", ".join(sizes[:-1]), sizes[-1]] if len(sizes) > 1 else sizes)
        raise ValueError(f"tensor_parallel_size cannot be {size}: {obstacle}; the model can be split among {named}")


def _obstacle(config: ModelConfig, size: int) -> str:
    """Return what cannot be divided among `size` ranks, or nothing."""
    for name, number in (("attention heads", config.num_heads), ("intermediate features", config.intermediate_size)):
        if number % size:
            return f"it does not divide the model's {number} {name}"
    try:
        num_kv_heads_of_rank(config.num_kv_heads, size)
    except ValueError as error:
        return str(error)
    return ""
