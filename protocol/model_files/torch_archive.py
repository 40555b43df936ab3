"""A quick check, without torch, that a file which torch wrote (.bin) is whole. It reads the archive's directory only.

Such a file is a zip archive of uncompressed members: data.pkl names the tensors, and each tensor is one more member.
"""

import zipfile
from pathlib import Path

from octavo.protocol.model_files.bounded import LARGEST_LIST_BYTES

ZIP_START = b"PK"
PICKLE_START = b"\x80"  # of files that torch before version 1.6 wrote


def damage(path: Path) -> str:
    """Return what is wrong with a file and what to do, or nothing if the file seems whole. Raises OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(ZIP_START))
    if start.startswith(PICKLE_START):
        return (
            "has the form of torch before version 1.6, which can only be read as a whole into memory. Save the model as"
            " safetensors (save_pretrained does)"
        )
    if start != ZIP_START:
        return "is not a file of weights: torch's files begin otherwise. Download it again"
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, UnicodeDecodeError):
        return f"is damaged or incomplete: the {size:,} bytes are not a whole archive. Download it again"
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        return "is compressed, which torch's own files are not. Save the model as safetensors (save_pretrained does)"
    if any(member.header_offset + member.file_size > size for member in members):
        return f"is damaged or incomplete: its {size:,} bytes are fewer than its members have. Download it again"
    pickles = [member for member in members if member.filename.endswith("data.pkl")]
    if len(pickles) != 1 or pickles[0].file_size > LARGEST_LIST_BYTES:
        return "is not a file of weights: its data.pkl is absent or too large. Download it again"
    return ""
