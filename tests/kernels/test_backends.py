"""Each backend has what `Backend` says; the one that the others are compared with is right."""

import importlib
import inspect
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
import torch

from octavo.kernels import cpu, reference
from octavo.kernels.backend import Backend
from octavo.kernels.choice import available_backends, choose_backend
from octavo.kernels.gpu import NO_GPU, Gpu, find_gpu
from octavo.protocol.config import FIELDS

TRITON = pytest.param("triton", marks=pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton"))


@pytest.mark.parametrize("name", ["cpu", "reference", TRITON])
def test_a_backend_has_every_function_with_its_options(name: str) -> None:
    module = importlib.import_module(f"octavo.kernels.{name}")
    functions = [function for name, function in vars(Backend).items() if not name.startswith("_")]
    assert len(functions) > 10
    for function in functions:
        _, *expected = inspect.signature(function).parameters.values()
        found = list(inspect.signature(getattr(module, function.__name__)).parameters.values())
        assert len(found) == len(expected), function
        assert options(found) == options(expected), function


def test_a_chosen_backend_is_the_module_that_others_import() -> None:
    """Under another name there would be a second copy, and outside a checkout none."""
    assert choose_backend("cpu", Gpu(None)).backend is cpu
    assert choose_backend("reference", Gpu(None)).backend is reference


def options(parameters: Iterable[inspect.Parameter]) -> dict[str, object]:
    """Return the defaults of the parameters that have one, which callers give by name."""
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def test_a_backend_that_the_machine_lacks_is_refused_with_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so it has triton")
    with pytest.raises(ValueError, match=r"it has: auto, cpu, reference$"):
        choose_backend("triton")


TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)."


class Cuda:
    """Stands in for torch.cuda."""

    def __init__(self, said: str | None = None) -> None:
        self.said = said

    def is_available(self) -> bool:
        return False

    def init(self) -> None:
        if self.said is not None:
            raise RuntimeError(self.said)

    def get_device_capability(self) -> tuple[int, int]:
        raise AssertionError("there is none")


@pytest.fixture
def machine_with_driver(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    return tmp_path


def test_a_driver_that_does_not_match_torch_is_refused_with_what_torch_says(machine_with_driver: Path) -> None:
    gpu = find_gpu(Cuda(TOO_OLD), machine_with_driver, {}, is_expected=True)
    with pytest.raises(ValueError, match=r"driver on your system is too old.*--attention-backend cpu"):
        choose_backend("auto", gpu)
    with pytest.raises(ValueError, match=r"'triton' is not available .* needs a GPU, .*too old"):
        choose_backend("triton", gpu)
    assert choose_backend("cpu", gpu).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("said", "environ", "is_expected"),
    [
        (TOO_OLD, {"CUDA_VISIBLE_DEVICES": ""}, True),
        (TOO_OLD, {}, False),  # torch was built without CUDA
        (NO_GPU, {}, True),
        (None, {}, True),
    ],
)
def test_without_a_gpu_that_should_work_auto_is_the_cpu(
    said: str | None, environ: dict[str, str], is_expected: bool, machine_with_driver: Path
) -> None:
    gpu = find_gpu(Cuda(said), machine_with_driver, environ, is_expected=is_expected)
    assert choose_backend("auto", gpu).name == "cpu"
    assert choose_backend("auto", find_gpu(Cuda(TOO_OLD), machine_with_driver / "dev", {})).name == "cpu"


def test_a_gpu_that_is_too_old_for_the_kernels_is_told_apart() -> None:
    with pytest.raises(ValueError, match=r"of compute capability 8\.0, and this one has 7\.5"):
        choose_backend("triton", Gpu((7, 5)))


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton")
def test_the_setting_has_the_names_of_all_backends() -> None:
    names = get_args(FIELDS["attention_backend"].type)[0]
    assert set(get_args(names)) == {"auto", *available_backends(Gpu((9, 0)))}


@pytest.mark.parametrize("name", ["FLASH_ATTN", "FLASHINFER", "XFORMERS", "fa3"])
def test_another_servers_backend_is_told_which_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is not available on this machine; it has: auto, "):
        choose_backend(name)


def test_the_references_attention_is_torchs() -> None:
    """Against torch's own, which has no paging."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, heads, 8, generator=generator) for heads in (4, 2, 2))
    k_cache, v_cache = torch.zeros(4, 2, 8, 4), torch.zeros(4, 2, 4, 8)
    slots = torch.tensor([8, 9, 10, 11, 0, 1])
    reference.store_kv(k, v, k_cache, v_cache, slots)
    out = reference.paged_attention(
        *(q, k_cache, v_cache, torch.tensor([[2, 0]], dtype=torch.int32)),
        *(torch.tensor([0, 6], dtype=torch.int32), torch.tensor([6], dtype=torch.int32), 0.3),
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(0, 1))
