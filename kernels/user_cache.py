"""Where the user's cache is."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the folder of the user's cache, which may not exist; `/.cache` for a user without a home."""
    home = os.path.expanduser("~")  # still "~" for a user without a home
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("/" if home == "~" else home, ".cache"))
