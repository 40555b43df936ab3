"""The wheel, installed away from the checkout: what it needs, what it says without, and that it generates."""

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from octavo.protocol.extras import EXTRAS
from octavo.protocol.version import __version__
from tests.fakes.waiting import wait_until

ROOT = Path(__file__).parents[2]
PACKAGES = ("bench", "executor", "gateway", "kernels", "octavo", "protocol", "scheduler")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What each package may import, beside the base: its own extra. The command line's modules import where it is needed.
EXTRA_OF = {
    "protocol": (),
    "scheduler": (),
    "gateway": ("gateway",),
    "executor": ("executor",),
    "kernels": ("executor",),
}
LIBRARIES = Path(sysconfig.get_path("purelib"))  # what this test runs with
MARK = "PACKAGE_TEST"  # in the environment of a script and of its children

SCRIPT = """
import os
from octavo import LLM, SamplingParams

llm = LLM(model=os.environ["MODEL"])
outs = llm.generate(
    ["The capital of France is", "你好"], SamplingParams(temperature=.8, top_p=.95, max_tokens=20)
)
print(outs[0].prompt, outs[0].outputs[0].text)
print(len(outs), [len(out.outputs[0].token_ids) > 0 for out in outs])
"""


class Installation:
    """Virtual environments with the wheel: `full` finds the packages that run this test, `bare` two of them."""

    def __init__(self, directory: Path) -> None:
        self.wheel = build_wheel(directory)
        self.full = environment(directory / "full", LIBRARIES)
        install(self.wheel, self.full)
        base = directory / "base"
        base.mkdir()
        for name in ("msgspec", "zmq", "pyzmq.libs"):
            if (LIBRARIES / name).exists():
                (base / name).symlink_to(LIBRARIES / name)
        self.bare = environment(directory / "bare", base, site_packages_of(self.full))

    def run(self, python: Path, *arguments: str, cwd: Path, **environ: str) -> "subprocess.CompletedProcess[str]":
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OCTAVO_", "PYTHON"))}
        return subprocess.run(
            [python, *arguments], cwd=cwd, env=kept | environ, capture_output=True, text=True, timeout=240
        )


def build_wheel(directory: Path) -> Path:
    """Build from a copy, which leaves nothing in the checkout and takes nothing that lies in it."""
    source = directory / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(directory), str(source))
    [wheel] = directory.glob("octavo-*.whl")
    return wheel


def environment(directory: Path, *searched: Path) -> Path:
    """Return the Python of a new environment that also finds what lies in `searched`."""
    venv.create(directory, with_pip=False)
    python = directory / "bin" / "python"
    (site_packages_of(python) / "searched.pth").write_text("".join(f"{path}\n" for path in searched))
    return python


def site_packages_of(python: Path) -> Path:
    [path] = python.parent.parent.glob("lib/python*/site-packages")
    return path


def install(wheel: Path, python: Path) -> None:
    pip("--python", str(python), "install", str(wheel))


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", *arguments, "--no-deps", "--no-index"]
    subprocess.run(command, check=True, timeout=120)


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(tmp_path_factory.mktemp("installation"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder, with a file that has the name of one of our packages."""
    (tmp_path / "scheduler.py").write_text("raise SystemExit('the wrong scheduler')\n")
    return tmp_path


def test_the_wheel_has_every_source_under_one_name(installation: Installation) -> None:
    names = zipfile.ZipFile(installation.wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"octavo", f"octavo-{__version__}.dist-info"}
    sources = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {path if path.startswith("octavo/") else f"octavo/{path}" for path in sources} <= set(names)


def test_a_script_without_a_main_guard_generates_and_leaves_nothing_behind(
    installation: Installation, folder: Path, demo_directory: Path
) -> None:
    (folder / "script.py").write_text(SCRIPT)
    environ = {
        "MODEL": str(demo_directory),
        "OCTAVO_DTYPE": "float32",
        "OCTAVO_ATTENTION_BACKEND": "reference",  # nothing to compile for the new place that the sources are in
        "OCTAVO_KV_CACHE_MEMORY_BYTES": "384MiB",
        MARK: str(folder),
    }
    done = installation.run(installation.full, "script.py", cwd=folder, **environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of France is ")
    assert done.stdout.splitlines()[-1] == "2 [True, True]"
    wait_until(lambda: not list(marked(folder)), 10)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_package_named_as_a_folder_of_ours_is_left_alone(
    is_first: bool, installation: Installation, tmp_path: Path
) -> None:
    """Hugging Face has a package `kernels`, which transformers looks for."""
    other = tmp_path / "kernels-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(other, "w") as wheel:
        wheel.writestr("kernels/__init__.py", "NAME = 'not ours'\n")
        wheel.writestr("kernels-0.1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: kernels\nVersion: 0.1.0\n")
        wheel.writestr(
            "kernels-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("kernels-0.1.0.dist-info/RECORD", "")
    python = environment(tmp_path / "environment", LIBRARIES)
    for wheel_file in (other, installation.wheel) if is_first else (installation.wheel, other):
        install(wheel_file, python)
    code = (
        "import kernels, octavo.kernels.choice; from transformers import LlamaConfig, LlamaForCausalLM;"
        "print(kernels.NAME, LlamaConfig().model_type, octavo.kernels.choice.CPU)"
    )
    done = installation.run(python, "-c", code, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "not ours llama cpu\n"), done.stderr


def test_a_python_without_octavo_imports_transformers_in_the_checkout(tmp_path: Path) -> None:
    """Our folders lie in its current directory, which it searches first."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for path in LIBRARIES.iterdir():
        if "octavo" not in path.name:
            (libraries / path.name).symlink_to(path)
    python = environment(tmp_path / "environment", libraries)
    code = "from transformers import LlamaConfig; print(LlamaConfig().model_type)"
    done = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "llama\n"), done.stderr


def marked(folder: Path) -> Iterator[int]:
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder):
                yield process.pid
        except psutil.Error:
            continue


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--version"], __version__),
        (["serve", "--help"], "Serve a model over HTTP"),
        (["supervise", "--help"], "status 2"),
        (["bench", "step", "--help"], "--repeats"),
    ],
)
def test_the_command_runs_outside_the_checkout(
    arguments: list[str], said: str, installation: Installation, folder: Path
) -> None:
    for command in (["-P", str(installation.full.parent / "octavo")], ["-P", "-m", "octavo"]):
        done = installation.run(installation.full, *command, *arguments, cwd=folder)
        assert (done.returncode, done.stderr) == (0, "")
        assert said in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["octavo", "serve"], 1, 'octavo: octavo serve needs gguf, {}: pip install ".[gateway,executor]"\n'),
        (
            ["octavo", "serve", "--dry-run"],
            1,
            'octavo: octavo serve needs gguf, {}: pip install ".[gateway,executor]"\n',
        ),
        (
            ["octavo", "bench", "serve"],
            1,
            'octavo: octavo bench serve needs aiohttp, {}: pip install ".[bench]"\n',
        ),
        (["octavo", "pull"], 1, 'octavo: octavo pull needs gguf, {}: pip install ".[gateway]"\n'),
        (["octavo.gateway"], 2, 'python -m octavo.gateway: it needs gguf, {}: pip install ".[gateway]"\n'),
        (["octavo.executor"], 2, 'python -m octavo.executor: it needs torch, {}: pip install ".[executor]"\n'),
    ],
)
def test_a_missing_extra_is_one_sentence(
    arguments: list[str], status: int, said: str, installation: Installation, tmp_path: Path
) -> None:
    done = installation.run(installation.bare, "-m", *arguments, cwd=tmp_path)
    absent = (
        "which is not installed here. In Octavo's checkout (or with its wheel in place of the dot) this installs it and"
        " whatever else is needed"
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "", said.format(absent))


def test_the_base_has_a_scheduler_and_a_supervisor_and_knows_what_llm_lacks(
    installation: Installation, tmp_path: Path
) -> None:
    for module in ("octavo.scheduler.server", "octavo.serving.supervise", "octavo.cli"):
        done = installation.run(installation.bare, "-c", f"import {module}", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
    done = installation.run(installation.bare, "-c", "from octavo import LLM", cwd=tmp_path)
    assert done.stderr.splitlines()[-1].startswith("octavo.protocol.extras.MissingExtraError: octavo.LLM needs gguf, ")


@pytest.mark.parametrize("package", EXTRA_OF)
def test_each_package_imports_only_what_its_extra_brings(package: str) -> None:
    brought = {distribution for extra in EXTRA_OF[package] for distribution in required(extra)} | required(None)
    distributions = metadata.packages_distributions()
    for path in (ROOT / package).rglob("*.py"):
        for module in foreign_imports(path):
            assert {normal(name) for name in distributions[module]} & brought, f"{path} imports {module}"


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_is_looked_for_is_what_an_extra_brings(extra: str) -> None:
    """Triton is looked for where it is chosen: not every machine can have it."""
    distributions = metadata.packages_distributions()
    found = {normal(name) for module in EXTRAS[extra] for name in distributions[module]}
    assert found == required(extra) - {"triton"}


def test_gateways_need_no_torch_and_schedulers_next_to_nothing() -> None:
    assert required(None) == {"msgspec", "pyzmq"}
    assert "torch" in required("executor") - required("gateway")


def required(extra: str | None) -> set[str]:
    """Return the normal names of what an extra, or the base, requires directly."""
    listed = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {normal(line.split(">")[0]) for line in listed}


def normal(distribution: str) -> str:
    return distribution.strip().lower().replace("_", "-")


def foreign_imports(path: Path) -> Iterator[str]:
    """Yield the top modules that a file imports and that are neither Python's nor ours."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for module in {name.split(".")[0] for name in names}:
            if module not in sys.stdlib_module_names and module not in PACKAGES:
                yield module
