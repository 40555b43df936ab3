"""What a file is that should hold weights and does not: a failed download has left something else."""

from pathlib import Path

LFS_POINTER = b"version https://git-lfs"
# The first bytes of other kinds of file, and how a sentence goes on about them. Text comes first: a page may begin
# with an empty line.
TEXTS = {
    LFS_POINTER: "is only a pointer of Git LFS. Run `git lfs pull` in its directory",
    b"<!doctype html": "is a web page (HTML), and not what should have been downloaded. Download it again",
    b"<html": "is a web page (HTML), and not what should have been downloaded. Download it again",
    b"<?xml": "is a server's message (XML), and not what should have been downloaded. Download it again",
    b"{": "is a text (JSON), and not what should have been downloaded. Download it again",
}
LONGEST_START_BYTES = 64


def what_instead(path: Path) -> str:
    """Return what a file without weights is and what to do; "" for a file that may hold weights. Raises OSError."""
    with path.open("rb") as file:
        start = file.read(LONGEST_START_BYTES)
    if not start:
        return "is empty. Download it again"
    if not any(start):
        return "begins with nothing but zeros: its download has not ended. Download it again"
    if b"\0" in start:  # not text: the length of a safetensors header can begin like text
        return ""
    text = start.lstrip().lower()
    return next((said for beginning, said in TEXTS.items() if text.startswith(beginning)), "")
