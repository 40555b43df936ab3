"""Models from ModelScope, with a package that stands in for `modelscope`. Each is fetched by a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.fake_hub import FakeHub, running
from tests.fakes.safetensors_files import NO_TENSORS

ROOT = Path(__file__).parents[2]
STAND_IN = """
import os, pathlib
from fnmatch import fnmatch
from modelscope.hub.errors import NotExistError

WANTED = {
    "config.json": True, "model.safetensors": True, "additional_chat_templates/rag.jinja": True,
    "original/model.safetensors": False, "assets/rag.jinja": False,
}

def snapshot_download(model_id, *, allow_patterns, ignore_patterns, local_files_only):
    if model_id != "org/tiny" or local_files_only:
        raise NotExistError(f"there is no {model_id}\\nat all")
    directory = pathlib.Path(os.environ["MODELSCOPE_CACHE"])
    for name, wanted in WANTED.items():
        allowed, ignored = (any(fnmatch(name, p) for p in ps) for ps in (allow_patterns, ignore_patterns))
        assert (allowed and not ignored) == wanted, name
    return str(directory)
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder of packages, in which `modelscope` has nothing but `org/tiny`."""
    hub = tmp_path / "packages" / "modelscope" / "hub"
    hub.mkdir(parents=True)
    (hub.parent / "__init__.py").write_text(STAND_IN)
    (hub / "errors.py").write_text("class NotExistError(Exception): pass\n")
    return tmp_path / "packages"


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    directory = tmp_path / "cached"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(NO_TENSORS)
    return directory


def pull(model: str, *flags: str, packages: Path | None = None, **environ: str) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join(map(str, [*([packages] if packages else []), ROOT]))
    return subprocess.run(
        [sys.executable, "-m", "octavo", "pull", model, *flags],
        env=os.environ | {"PYTHONPATH": path} | environ,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_the_variable_and_the_flag_fetch_from_modelscope(packages: Path, cached: Path) -> None:
    with running(FakeHub({})) as hub:
        environ = {"MODELSCOPE_ENDPOINT": hub.endpoint, "MODELSCOPE_CACHE": str(cached)}
        by_variable = pull("org/tiny", packages=packages, OCTAVO_USE_MODELSCOPE="True", **environ)
        by_flag = pull("org/tiny", "--use-modelscope", packages=packages, **environ)
        unknown = pull("org/tyni", "--use-modelscope", packages=packages, **environ)
    assert [by_variable.stdout.strip(), by_flag.stdout.strip()] == [str(cached)] * 2
    assert unknown.returncode == 1
    [line] = unknown.stderr.splitlines()
    assert f"org/tyni could not be fetched from ModelScope at {hub.endpoint} (there is no org/tyni)" in line


def test_a_modelscope_that_cannot_be_reached_is_named_with_the_remedies(packages: Path, cached: Path) -> None:
    with running(FakeHub({})) as hub:
        endpoint_of_nobody = hub.endpoint
    environ = {"MODELSCOPE_ENDPOINT": endpoint_of_nobody, "MODELSCOPE_CACHE": str(cached)}
    ended = pull("org/tiny", "--use-modelscope", packages=packages, **environ)
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert f"from ModelScope at {endpoint_of_nobody} ([Errno 111] Connection refused)" in line
    assert "MODELSCOPE_ENDPOINT" in line
    assert "a local path" in line
