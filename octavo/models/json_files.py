"""A model's small JSON files."""

import json
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.protocol.model_files.bounded import read_bounded


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in `path`, an empty one if there is no such file. Raises ModelError if it is damaged."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_bounded(path))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Download the model again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object. Download the model again.")
    return content


def write_object(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
