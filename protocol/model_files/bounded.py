"""A model's small files, read only if they are as small as such files are: they may be a stranger's."""

from pathlib import Path

LARGEST_BYTES = 16_000_000  # settings and templates, of which the largest have one million
LARGEST_LIST_BYTES = 100_000_000  # tokenizer.json and indexes, of which the largest have some ten millions


def read_bounded(path: Path, largest_bytes: int = LARGEST_BYTES) -> bytes:
    """Return a file's content. Raises ValueError if it is larger than any such file, and OSError."""
    with path.open("rb") as file:
        content = file.read(largest_bytes + 1)
    if len(content) > largest_bytes:
        raise ValueError(f"it has more than {largest_bytes:,} bytes, which no such file of a model has")
    return content
