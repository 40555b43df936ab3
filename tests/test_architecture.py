"""The house: which package may import which, who stays free of torch, and what never touches a socket."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.cli import COMMANDS
from protocol.config import FIELDS

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
    """Yield the first part of every module that the file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_each_package_imports_only_what_the_design_allows(package: str) -> None:
    assert sources(package), f"{package} has no files"
    ours = set(MAY_IMPORT) - {package}
    for path in sources(package):
        wrong = set(imports(path)) & ((ours - MAY_IMPORT[package]) | FORBIDDEN_LIBRARIES.get(package, set()))
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_nothing_pickles_or_evaluates(package: str) -> None:
    for path in sources(package):
        assert not set(imports(path)) & UNSAFE, path
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


@pytest.mark.parametrize("module", ["gateway.http.app", "gateway.__main__", "scheduler.server", "scheduler.__main__"])
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
    assert set(importlib.import_module(f"{package}.__main__").FIELDS) == (read & FIELDS.keys()) - {"log_level"}
