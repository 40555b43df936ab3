"""Whether a progress bar is shown: `progress` says so, None if stderr is a terminal."""


def tqdm_disable(progress: bool | None) -> bool | None:
    """Return tqdm's `disable`, in which None means: unless stderr is a terminal."""
    return None if progress is None else not progress
