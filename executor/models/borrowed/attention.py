"""Our attention inside transformers' modelling code: how a layer's call reaches the paged cache, and what a layer is.

transformers' attention modules call a function that is registered by name with (module, query, key, value, mask, ...).
Ours is one function without state: it passes the call on to the module's attribute `paged`, which `look_at_layers` sets
for a moment to a recorder and then, on the modules that called, to their layer of the model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from octavo.executor.models.inputs import StepInputs
from octavo.executor.models.kv_caches import KVCaches, KVShape
from octavo.kernels.backend import Backend, PackedLinear

# T tokens of this step, H query heads, K key/value heads, D head size, S sequences

PAGED = "octavo_paged"  # no mask is registered under this name: transformers then builds none
LOOKING = "octavo_looking"  # a mask under this name describes the mask that it stands for
PROBE_TOKENS = 6
FAR_TOKENS = 1 << 30  # where a mask is tried: beyond every window
# Keywords of a call that change nothing here: dropout is off, the rest says what `StepInputs` says.
WITHOUT_MEANING = {
    "dropout", "is_causal", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids",
    "cache_position", "output_attentions", "use_cache", "deterministic", "sliding_window", "output_router_logits",
    "num_items_in_batch", "logits_to_keep",
}  # fmt: skip


class UnsupportedModelError(ValueError):
    """An architecture that cannot be served, and why."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One call of attention in a forward pass."""

    module: nn.Module
    kv_shape: KVShape
    sliding_window: int | None


@dataclass(slots=True)
class CurrentStep:
    """What the layers of one model work on during a forward pass, and with what."""

    backend: Backend
    inputs: StepInputs | None = None
    kv_caches: KVCaches | None = None

    def linear(self, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None) -> Tensor:
        """Return the product of rows with a layer: of all the step's tokens, or of those that an expert is given."""
        out_TN = self.backend.linear(x.reshape(-1, x.shape[-1]), packed, out_dtype)
        return out_TN.view(*x.shape[:-1], -1)


class PagedLayer:
    """Attention of one layer over the paged cache."""

    def __init__(self, index: int, sliding_window: int | None, current: CurrentStep) -> None:
        self.index = index
        self.sliding_window = sliding_window
        self.current = current

    def __call__(
        self, module: nn.Module, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, _: object, **keywords: Any
    ) -> tuple[Tensor, None]:
        backend, inputs, kv_caches = self.current.backend, self.current.inputs, self.current.kv_caches
        assert inputs is not None
        assert kv_caches is not None
        k_cache_NKDP, v_cache_NKPD = kv_caches[self.index]
        dtype = q_1HTD.dtype if k_cache_NKDP.dtype.itemsize == 1 else k_cache_NKDP.dtype
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1).contiguous().to(dtype) for x in (q_1HTD, k_1KTD, v_1KTD))
        backend.store_kv(k_TKD, v_TKD, k_cache_NKDP, v_cache_NKPD, inputs.slot_mapping_T)
        sinks_H = keywords.get("s_aux")
        out_THD = backend.paged_attention(
            q_THD,
            k_cache_NKDP,
            v_cache_NKPD,
            inputs.block_tables_SM,
            inputs.cu_seqlens_q,
            inputs.seq_lens_S,
            _scale(keywords.get("scaling"), q_THD),
            self.sliding_window,
            keywords.get("softcap"),
            None if sinks_H is None else sinks_H.float(),
        )
        return out_THD.to(q_1HTD.dtype).unsqueeze(0), None


def look_at_layers(model: nn.Module, forward: Callable[[], object], architecture: str) -> list[AttentionLayer]:
    """Return the attention layers of `model` in the order in which `forward` calls them.

    `forward` runs the model on PROBE_TOKENS tokens with its attention implementation being LOOKING; the model may be on
    the meta device. Raises UnsupportedModelError for what `PagedLayer` would not compute.
    """
    recorder = _Recorder(architecture)
    for module in model.modules():
        module.paged = recorder  # type: ignore[assignment]
    try:
        forward()
    finally:
        for module in model.modules():
            del module.paged
    return recorder.layers


def register() -> None:
    """Make our attention known to transformers by name; doing it again changes nothing."""
    AttentionInterface.register(PAGED, _attention)
    AttentionInterface.register(LOOKING, _attention)
    AttentionMaskInterface.register(LOOKING, _describe_mask)


class _Recorder:
    """Stands for the attention of every layer during the first look at a model."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self.layers: list[AttentionLayer] = []

    def __call__(
        self,
        module: nn.Module,
        q_1HTD: Tensor,
        k_1KTD: Tensor,
        v_1KTD: Tensor,
        attention_mask: Tensor | None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        unknown = {name for name, value in keywords.items() if value is not None} - WITHOUT_MEANING
        if unknown := unknown - {"scaling", "softcap", "s_aux"}:
            self._refuse(f"its attention takes {', '.join(sorted(unknown))}")
        if any(layer.module is module for layer in self.layers):
            self._refuse("its layers share attention modules")
        if k_1KTD.shape[2] != PROBE_TOKENS or q_1HTD.shape[2] != PROBE_TOKENS:
            self._refuse("its attention does not see each token once")
        kv_shape = (k_1KTD.shape[1], k_1KTD.shape[3], v_1KTD.shape[3])
        self.layers.append(AttentionLayer(module, kv_shape, self._window(attention_mask)))
        return v_1KTD.new_zeros((1, PROBE_TOKENS, q_1HTD.shape[1], v_1KTD.shape[3])), None

    def _window(self, attention_mask: Tensor | None) -> int | None:
        if attention_mask is None:
            self._refuse("its attention has no mask")
        if attention_mask.dtype != torch.int64 or attention_mask.is_meta:
            self._refuse("it builds its attention mask itself")
        window = int(attention_mask.flatten()[0])
        if window < 0:
            self._refuse("a token attends to others than itself and the last ones before it")
        return window or None

    def _refuse(self, reason: str) -> NoReturn:
        raise UnsupportedModelError(f"{self._architecture} is not supported: {reason}")


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any) -> Any:
    return module.paged(module, query, key, value, attention_mask, **keywords)


def _describe_mask(*, mask_function: Callable[..., Tensor], **_: object) -> Tensor:
    """Return, in the shape of a mask, the window of causal attention; 0 without one, -1 for another pattern."""

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(*(torch.tensor(index) for index in (0, 0, query, key))))

    try:
        window = _window_of(sees)
    except (NotImplementedError, IndexError, RuntimeError):  # the mask depends on values, which do not exist yet
        window = -1
    return torch.tensor(window).view(1, 1, 1, 1)


def _window_of(sees: Callable[[int, int], bool]) -> int:
    """Return how many last tokens a query sees: 0 for all, -1 if what it sees is something else."""
    window = _num_seen(sees, FAR_TOKENS)
    is_alike = all(_num_seen(sees, FAR_TOKENS + further) == window for further in (1, 1000, 4097))
    if sees(FAR_TOKENS, 0):
        return -1 if sees(FAR_TOKENS, FAR_TOKENS + 1) else 0
    return window if is_alike and window > 0 and not sees(FAR_TOKENS, FAR_TOKENS + 1) else -1


def _num_seen(sees: Callable[[int, int], bool], query: int) -> int:
    """Return the number of keys from `query` backwards that it sees, supposing that they lie side by side."""
    least, beyond = 0, query + 1
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if sees(query, query - middle + 1) else (least, middle)
    return least


def _scale(scaling: float | None, q_THD: Tensor) -> float:
    return 1 / math.sqrt(q_THD.shape[-1]) if scaling is None else float(scaling)
