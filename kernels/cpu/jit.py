"""Compilation for the CPU: one OpenMP runtime, a cache that is never stale, one decorator.

Import this before torch. Numba's OpenMP layer asks for the system's libgomp; torch, loaded later, then finds that one
by its soname. The other way round there are two runtimes, whose idle threads spin on each other's cores.
"""

import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding  # type: ignore[import-untyped]
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator
from numba.core.registry import CPUDispatcher

from octavo.kernels.cpu.targets import parse_flags, target_for
from octavo.kernels.user_cache import user_cache

# A thread that waits for work spins this long before it sleeps. OpenMP's own default, milliseconds, gains nothing on a
# machine to itself and makes a step ten times as long where gateway, scheduler or clients want the same cores.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "200")
with suppress(ImportError):  # no libgomp on this system: Numba takes its own thread pool
    import numba.np.ufunc.omppool

logger = logging.getLogger(__name__)

# Makes the names of the parallel runtime known to whatever is loaded. A kernel in the cache asks for that itself only
# if the parallel routine that it calls was compiled together with it: not after a compilation that was broken off.
numba.get_num_threads()


def cache_directory() -> Path:
    """Return where compiled kernels are kept: below NUMBA_CACHE_DIR or the user's cache, a folder for these sources.

    Numba notices changes in a function's own file only, not in the files it calls into; hence the digest of all.
    """
    base = Path(os.environ.get("NUMBA_CACHE_DIR") or user_cache() / "octavo" / "numba")
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources))
    return base / digest.hexdigest()[:16]


def shipped_directory() -> Path | None:
    """Return where an image has kernels for many CPUs, below SHIPPED_KERNELS_DIR: they are read, none is added."""
    base = os.environ.get("SHIPPED_KERNELS_DIR")
    return Path(base, cache_directory().name) if base else None


def _aim(host: Mapping[str, bool]) -> Mapping[str, bool]:
    """Have Numba compile for a kind of CPU, if its own variables name no CPU; return the features that code may use."""
    target = target_for(host)
    if target and numba.config.CPU_NAME is None and numba.config.CPU_FEATURES is None:
        numba.config.CPU_NAME, numba.config.CPU_FEATURES = target.cpu, target.flags
    flags = numba.config.CPU_FEATURES
    return host if flags is None else parse_flags(flags)


def _use_cache(directory: Path) -> bool:
    """Point Numba's cache to `directory`; return whether it can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        missing = " what the image lacks" if shipped_directory() else ""
        logger.warning("compiled kernels cannot be kept, each start compiles anew%s: %s", missing, error)
        return False
    numba.config.CACHE_DIR = str(directory)
    return True


class _ShippedLocator(UserProvidedCacheLocator):  # type: ignore[misc]  # Numba has no types
    """Finds a function below the shipped directory, also where nothing may be written."""

    def __init__(self, function: object, file: str) -> None:
        super().__init__(function, file)
        self._cache_path = os.path.join(shipped_directory() or "", self.get_suitable_cache_subpath(file))

    @classmethod
    def from_function(cls, function: object, file: str) -> "_ShippedLocator":
        return cls(function, file)


class _ShippedImpl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_ShippedLocator,)


class ShippedCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache in the shipped directory."""

    _impl_class = _ShippedImpl

    def save_overload(self, sig: object, data: object) -> None:
        pass


class SharedCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache, to which several processes may add at once, behind what is shipped.

    Numba reads its index, writes a file under the next free number, and writes the index: two processes could give one
    number to two compilations, and whoever came later would run one as the other.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._shipped = ShippedCache(function) if shipped_directory() else None

    def load_overload(self, sig: object, target_context: object) -> Any:
        found = self._shipped and self._shipped.load_overload(sig, target_context)
        return found or super().load_overload(sig, target_context)

    def save_overload(self, sig: object, data: object) -> None:
        with suppress(OSError), (cache_directory() / ".lock").open("w") as file:  # what cannot be kept is only not kept
            fcntl.flock(file, fcntl.LOCK_EX)
            super().save_overload(sig, data)


def cache_of(function: Callable[..., Any]) -> FunctionCache | None:
    """Return where the compiled function is kept, if it is anywhere."""
    if IS_KEPT:
        return SharedCache(function)
    return ShippedCache(function) if shipped_directory() else None


class _OnlyCompiled(CPUDispatcher):  # type: ignore[misc]
    """A kernel that this CPU cannot run: a call compiles it for these arguments and does nothing."""

    def __call__(self, *args: object) -> int:
        self.compile(tuple(self.typeof_pyval(arg) for arg in args))
        return -1  # what kernels that look for faults in their arguments return if there is none


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function called from Python, with these options of numba.njit.

    No `fastmath`: results must not depend on how a loop was vectorised or inlined. Fused multiply-adds are written out.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(nogil=True, error_model="numpy", **options)(function)
        if cache := cache_of(function):
            dispatcher._cache = cache  # as `cache=True` does with Numba's own
        if ONLY_COMPILES:
            dispatcher.__class__ = _OnlyCompiled
        return dispatcher

    return compiled


_HOST = binding.get_host_cpu_features()
FEATURES = _aim(_HOST)
ONLY_COMPILES = any(is_on and not _HOST.get(name) for name, is_on in FEATURES.items())
IS_KEPT = _use_cache(cache_directory())
routine = partial(kernel, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # decorates what only kernels call


def openmp_libraries() -> list[str]:
    """Return the OpenMP runtimes that this process has mapped; more than one costs speed (see above)."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "gomp" in line or "iomp" in line}
    return sorted(path for path in paths if path.startswith("/"))
