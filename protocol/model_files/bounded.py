"""Reading a model's small files, with a limit on their size: a stranger may have written them."""

from pathlib import Path

LARGEST_BYTES = 16_000_000  # of settings and templates; the largest known ones have a million
LARGEST_LIST_BYTES = 100_000_000  # of tokenizer.json and indexes; the largest known ones have some ten million


def read_bounded(path: Path, largest_bytes: int = LARGEST_BYTES) -> bytes:
    """Return a file's content. Raises ValueError for a file above the limit, and OSError."""
    with path.open("rb") as file:
        content = file.read(largest_bytes + 1)
    if len(content) > largest_bytes:
        raise ValueError(f"it has more than {largest_bytes:,} bytes: no such file of a model is that large")
    return content
