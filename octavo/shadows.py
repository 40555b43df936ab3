"""Finds a user's file that would be imported in the place of one of our packages. Imports nothing of ours."""

import importlib.util
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

OURS = Path(__file__).resolve().parent.parent


def require_ours(package: str) -> None:
    """Raise ImportError, naming the file, if `import package` here gets something else than our package."""
    module = sys.modules.get(package)
    spec = module.__spec__ if module is not None else importlib.util.find_spec(package)
    if spec is not None and not _is_ours(spec):
        raise ImportError(_complaint(package, spec), name=package, path=spec.origin)


def shadowed_in_children(packages: Iterable[str], pythonpath: str) -> str | None:
    """Return the complaint about the first of `packages` that a child would find in PYTHONPATH and not with us."""
    entries = [entry or "." for entry in pythonpath.split(":")] if pythonpath else []
    for package in packages:
        spec = PathFinder.find_spec(package, entries)
        if spec is not None and not _is_ours(spec):
            return f"{_complaint(package, spec)} (PYTHONPATH leads to it)"
    return None


def _is_ours(spec: ModuleSpec) -> bool:
    """Our packages, like any directory without __init__.py, have no origin: a module or a package comes before them."""
    return spec.origin is None


def _complaint(package: str, spec: ModuleSpec) -> str:
    return (
        f"{spec.origin} has the name of Octavo's own package {package!r} and would be imported in its place: rename "
        "that file, or move it to another directory"
    )
