"""Each backend has what `Backend` says; the one that the others are compared with is right."""

import importlib
import inspect
from collections.abc import Iterable
from importlib.util import find_spec

import pytest
import torch

from kernels import Backend, choose_backend, reference

TRITON = pytest.param("triton", marks=pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton"))


@pytest.mark.parametrize("name", ["cpu", "reference", TRITON])
def test_a_backend_has_every_function_with_its_options(name: str) -> None:
    module = importlib.import_module(f"kernels.{name}")
    functions = [function for name, function in vars(Backend).items() if not name.startswith("_")]
    assert len(functions) > 10
    for function in functions:
        _, *expected = inspect.signature(function).parameters.values()
        found = list(inspect.signature(getattr(module, function.__name__)).parameters.values())
        assert len(found) == len(expected), function
        assert options(found) == options(expected), function


def options(parameters: Iterable[inspect.Parameter]) -> dict[str, object]:
    """Return the defaults of the parameters that have one, which callers give by name."""
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


@pytest.mark.parametrize("name", ["FLASH_ATTN", "FLASHINFER", "triton"])
def test_a_backend_that_the_machine_lacks_is_refused_with_those_it_has(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so it has triton")
    with pytest.raises(ValueError, match=r"it has: auto, cpu, reference$"):
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
