"""Compilation for the CPU: one OpenMP runtime, a cache that is never stale, one decorator.

Import this before torch. Numba's OpenMP layer asks for the system's libgomp; torch, loaded later, then finds that one
by its soname. The other way round there are two runtimes, whose idle threads spin on each other's cores.
"""

import hashlib
import logging
import os
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import numba

# A thread that waits for work spins this long before it sleeps. OpenMP's own default, milliseconds, gains nothing on a
# machine to itself and makes a step ten times as long where gateway, scheduler or clients want the same cores.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "200")
with suppress(ImportError):  # no libgomp on this system: Numba takes its own thread pool
    import numba.np.ufunc.omppool

logger = logging.getLogger(__name__)

# Makes the names of the parallel runtime known to whatever is loaded. A kernel in the cache asks for that itself only if
# the parallel routine that it calls was compiled together with it: not after a compilation that was broken off.
numba.get_num_threads()


def cache_directory() -> Path:
    """Return where compiled kernels are kept: below NUMBA_CACHE_DIR or the user's cache, a folder for these sources.

    Numba notices changes in a function's own file only, not in the files it calls into; hence the digest of all.
    """
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    base = Path(os.environ.get("NUMBA_CACHE_DIR") or user_cache / "octavo" / "numba")
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources))
    return base / digest.hexdigest()[:16]


def _use_cache(directory: Path) -> bool:
    """Point Numba's cache to `directory`; return whether it can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        logger.warning("compiled kernels cannot be kept, each start compiles anew: %s", error)
        return False
    numba.config.CACHE_DIR = str(directory)
    return True


# No `fastmath`: results must not depend on how a loop was vectorised or inlined. Fused multiply-adds are written out.
kernel = partial(numba.njit, nogil=True, error_model="numpy", cache=_use_cache(cache_directory()))  # called from Python
routine = partial(kernel, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # called from kernels only


def openmp_libraries() -> list[str]:
    """Return the OpenMP runtimes that this process has mapped; more than one costs speed (see above)."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "gomp" in line or "iomp" in line}
    return sorted(path for path in paths if path.startswith("/"))
