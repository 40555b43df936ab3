"""Whether a file that torch wrote (.bin) is whole, as far as its directory tells: in a moment, and without torch.

It is a zip archive whose members are not compressed: data.pkl names the tensors, which lie in members of their own.
"""

import zipfile
from pathlib import Path

from protocol.model_files.bounded import LARGEST_LIST_BYTES

ZIP_START = b"PK"
PICKLE_START = b"\x80"  # with which torch's files of before version 1.6 begin


def damage(path: Path) -> str:
    """Return what is wrong with a file and what to do, nothing if it seems whole. Raises OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(ZIP_START))
    if start.startswith(PICKLE_START):
        return (
            "has the form of torch before version 1.6, which cannot be read without holding all of it. Save the model"
            " as safetensors (save_pretrained does)"
        )
    if start != ZIP_START:
        return "is no file of weights: it does not begin as torch's files do. Download it again"
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, UnicodeDecodeError):
        return f"is damaged or incomplete: the {size:,} bytes are no whole archive. Download it again"
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        return "is compressed, as torch writes no file. Save the model as safetensors (save_pretrained does)"
    if any(member.header_offset + member.file_size > size for member in members):
        return f"is damaged or incomplete: it has {size:,} bytes, less than its members. Download it again"
    pickles = [member for member in members if member.filename.endswith("data.pkl")]
    if len(pickles) != 1 or pickles[0].file_size > LARGEST_LIST_BYTES:
        return "is no file of weights: it has no data.pkl, or too large a one. Download it again"
    return ""
