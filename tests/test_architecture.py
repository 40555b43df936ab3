"""The house: which package may import which, who stays free of torch, and what never touches a socket."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from octavo.cli import COMMANDS
from octavo.protocol.config import FIELDS

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "protocol": set(),
    "gateway": {"protocol"},
    "scheduler": {"protocol"},
    "kernels": set(),
    "executor": {"protocol", "kernels"},
    "octavo": {"gateway", "protocol"},
    "bench": {"protocol", "gateway", "scheduler", "kernels", "executor", "octavo"},
}
ROOMS_MAY_IMPORT = {
    "gateway/text": set(),
    "gateway/link": {"text"},
    "gateway/parsing": {"text"},
    "gateway/asking": {"text", "link", "parsing"},
    "gateway/openai": {"text", "asking", "parsing"},
    "gateway/anthropic": {"text", "asking", "parsing", "openai"},
    "gateway/responses": {"text", "asking", "parsing", "openai"},
    "gateway/measuring": {"text", "link"},
    "gateway/reading": {"text", "asking"},
    "gateway/http": {"text", "link", "parsing", "asking", "openai", "anthropic", "responses", "measuring", "reading"},
    "executor/machine": set(),
    "executor/quantization": set(),
    "executor/checkpoints": {"quantization"},
    "executor/models": {"checkpoints", "quantization"},
    "executor/step": {"models"},
    "executor/link": {"step", "machine"},
    "executor/start": {"step", "models", "checkpoints", "quantization", "machine"},
    "octavo/models": set(),
    "octavo/serving": {"models"},
    "octavo/python": {"models", "serving"},
    "octavo/terminal": {"python", "serving"},
    "octavo/batch": {"python"},
    "octavo/commands": {"models", "serving", "python", "terminal", "batch"},
}
FORBIDDEN_LIBRARIES = {
    "protocol": {"torch", "numpy", "numba", "transformers", "starlette", "uvicorn", "tokenizers"},
    "gateway": {"torch", "numba", "safetensors"},
    "scheduler": {"torch", "numpy", "numba", "transformers", "tokenizers", "starlette", "uvicorn"},
    "kernels": {"zmq", "msgspec", "transformers", "starlette"},
    "executor": {"tokenizers", "starlette", "uvicorn"},
}
UNSAFE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object"}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Yield the name of everything that the file imports, wherever the import stands: modules and what is in them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(name: str) -> str:
    """Return the folder of ours or the library that has what is imported as `name`."""
    first, *rest = name.split(".")
    return rest[0] if first == "octavo" and rest and rest[0] in MAY_IMPORT else first


def packages(path: Path) -> set[str]:
    return set(map(package_of, imports(path)))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__")


def arrows(package: str) -> dict[str, set[str]]:
    """Return which modules of a folder import which others of it, each as a path without its suffix."""
    found: dict[str, set[str]] = {name_of(path): set() for path in sources(package)}
    for path in sources(package):
        for imported in imports(path):
            place = (
                imported.replace(".", "/")
                if package == "octavo"
                else imported.removeprefix("octavo.").replace(".", "/")
            )
            module = place if place in found else place.rpartition("/")[0]
            if module in found and package_of(imported) == package:
                found[name_of(path)].add(module)
    return found


def room(module: str) -> str:
    """Return the folder that has the module, or its own name if it stands outside of all rooms."""
    return module.split("/")[1]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    """A module may import, late, the package that it is a part of."""
    found = {
        module: {other for other in others if not module.startswith(f"{other}/")}
        for module, others in arrows(package).items()
    }
    TopologicalSorter(found).prepare()


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_no_rooms_import_each_other_in_a_circle(package: str) -> None:
    """A module outside of all rooms counts as a room of its own."""
    rooms: dict[str, set[str]] = {}
    for module, others in arrows(package).items():
        if "/" in module:
            own = room(module)
            rooms.setdefault(own, set()).update({room(other) for other in others if "/" in other} - {own})
    TopologicalSorter(rooms).prepare()


@pytest.mark.parametrize("place", ROOMS_MAY_IMPORT)
def test_each_room_imports_only_the_rooms_below_it(place: str) -> None:
    package, _, name = place.partition("/")
    rooms = {other.partition("/")[2] for other in ROOMS_MAY_IMPORT if other.startswith(f"{package}/")}
    for module, others in arrows(package).items():
        if module.startswith(f"{place}/"):
            wrong = {room(other) for other in others if "/" in other} & (rooms - {name} - ROOMS_MAY_IMPORT[place])
            assert not wrong, f"{module} imports {sorted(wrong)}"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_each_package_imports_only_what_the_design_allows(package: str) -> None:
    assert sources(package), f"{package} has no files"
    ours = set(MAY_IMPORT) - {package}
    for path in sources(package):
        wrong = packages(path) & ((ours - MAY_IMPORT[package]) | FORBIDDEN_LIBRARIES.get(package, set()))
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_nothing_pickles_or_evaluates(package: str) -> None:
    for path in sources(package):
        assert not packages(path) & UNSAFE, path
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "id", None) or getattr(node, "attr", None)
            if name == "eval":  # torch's module.eval() takes nothing and evaluates nothing
                assert isinstance(node, ast.Attribute), f"{path}:{node.lineno} calls eval"
            else:
                assert name not in UNSAFE_CALLS, f"{path}:{getattr(node, 'lineno', 0)} uses {name}"
            if isinstance(node, ast.keyword) and node.arg == "shell":
                raise AssertionError(f"{path}:{node.lineno} runs a shell")


def test_the_python_api_loads_nothing_of_http() -> None:
    http = {"starlette", "uvicorn", "httptools", "prometheus_client"}
    code = f"import sys; from octavo import LLM, AsyncLLM; print(sorted({http!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    "module",
    ["octavo.gateway.http.app", "octavo.gateway.__main__", "octavo.scheduler.server", "octavo.scheduler.__main__"],
)
def test_gateway_and_scheduler_never_load_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules, 'numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("module", ["octavo.cli", *(f"octavo.commands.{name}" for name in COMMANDS)])
def test_the_command_line_starts_without_the_heavy_libraries(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'numba'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["gateway", "scheduler", "executor"])
def test_a_process_has_a_flag_for_each_setting_that_it_reads(package: str) -> None:
    """Attributes of what is called `config`; a model's config shares some names with ours, which the executor reads."""
    nodes = [node for path in sources(package) for node in ast.walk(ast.parse(path.read_text()))]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    read = {node.attr for node in attributes if getattr(node.value, "id", getattr(node.value, "attr", "")) == "config"}
    read |= {"link_keys_dir", "insecure_links"}  # which protocol/link_keys.py reads for each
    assert set(importlib.import_module(f"octavo.{package}.__main__").FIELDS) == (read & FIELDS.keys()) - {"log_level"}
