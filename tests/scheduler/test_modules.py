"""How the scheduler's modules depend on each other, and that its decisions touch no clock and no socket."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

SOURCES = {path.stem: path for path in (Path(__file__).parents[2] / "scheduler").glob("*.py")}
IMPURE = {"zmq", "time", "random", "socket", "threading", "os", "logging"}


def imports(module: str) -> set[tuple[str, ...]]:
    """Return the parts of the name of each module that a module of the scheduler imports, wherever it imports it."""
    nodes = list(ast.walk(ast.parse(SOURCES[module].read_text())))
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {tuple(name.split(".")) for name in names}


def needs(module: str) -> set[str]:
    """Return which modules of the scheduler a module imports."""
    return {parts[-1] for parts in imports(module) if len(parts) > 1 and parts[-2] == "scheduler"}


def test_modules_import_each_other_without_circles() -> None:
    graph = {module: needs(module) for module in SOURCES}
    assert graph["server"] >= {"backend", "frontend", "reports", "scheduler"}
    assert set(TopologicalSorter(graph).static_order()) == set(SOURCES)  # raises CycleError


def test_decisions_touch_no_clock_and_no_socket() -> None:
    pure, todo = set(), ["scheduler", "cadence", "delivery", "executor_link", "admission", "measures", "finish_rate"]
    while todo:
        module = todo.pop()
        pure.add(module)
        todo += needs(module) - pure
    assert {"planning", "results", "recovery", "accounts", "predictor"} < pure
    for module in pure:
        wrong = {parts[0] for parts in imports(module)} & IMPURE
        assert not wrong, f"{module} imports {sorted(wrong)}"
