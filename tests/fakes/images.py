"""What deploy/Dockerfile says of the images."""

import re
from collections.abc import Iterable
from pathlib import Path

DOCKERFILE = Path(__file__).parents[2] / "deploy" / "Dockerfile"


def hidden_kernels(mounts: Iterable[str]) -> list[str]:
    """Return those of `mounts` that would hide the compiled kernels of the executor's image."""
    [shipped] = re.findall(r"^ +SHIPPED_KERNELS_DIR=(\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    return [mount for mount in mounts if Path(shipped).is_relative_to(mount)]
