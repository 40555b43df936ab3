"""A decoder of transformers as the runner sees it."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from octavo.executor.models.borrowed.attention import CurrentStep, PagedLayer
from octavo.executor.models.borrowed.config import BorrowedConfig
from octavo.executor.models.inputs import StepInputs
from octavo.executor.models.interface import watch_each
from octavo.executor.models.kv_caches import KVCaches, KVShape
from octavo.executor.quantization import round_weight
from octavo.kernels.backend import PackedLinear
from octavo.kernels.groupwise import GroupwiseWeight

# T tokens of this step, S rows, E hidden size, N outputs, K inputs, V vocabulary

FEWEST_ROUNDED_OUTPUTS = 32
ROUTERS = {"gate", "router"}  # names of layers that choose experts

logger = logging.getLogger(__name__)


class BackendLinear(nn.Module):
    """A linear layer whose product is that of the current step.

    `weight` has no values: modelling code asks for its dtype or shape.
    """

    def __init__(
        self, packed: PackedLinear, weight: Tensor, current: CurrentStep, out_dtype: torch.dtype | None = None
    ) -> None:
        """`packed` was made of `weight`; `out_dtype` is that of the result, None takes the input's."""
        super().__init__()
        self.weight = weight.to("meta")
        self.packed = packed
        self.current = current
        self.out_dtype = out_dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.current.linear(x, self.packed, self.out_dtype)


class BorrowedDecoder(nn.Module):
    """A causal language model of transformers over a paged KV cache.

    What follows the last hidden state (scales, caps, biases) is transformers' code as well: the head is the causal
    model itself with its body replaced by one that returns what it is given.
    """

    def __init__(self, config: BorrowedConfig, causal_model: Any, current: CurrentStep) -> None:
        """`current` is what the causal model's packed layers have as well."""
        super().__init__()
        self.config = config
        self.causal_model = causal_model
        self.current = current
        self.kv_shapes: list[KVShape] = config.kv_shapes
        self.num_layers = len(config.layers)
        self.vocab_size = config.vocab_size
        self.hidden_size: int = config.transformers_config.hidden_size
        modules = dict(causal_model.named_modules())
        self.layers = [modules[layer.path] for layer in config.layers]
        for index, layer in enumerate(config.layers):
            modules[layer.path].paged = PagedLayer(index, layer.sliding_window, self.current)
        self._body: list[Any] = [modules[config.body_path]]  # lists: the modules are causal_model's
        self._head = [_with_module(causal_model, config.body_path.split("."), _GivenHidden(config.body_output))]

    @property
    def products(self) -> list[PackedLinear]:
        """Return what the backend made of weights, each once."""
        return [module.packed for module in self.modules() if isinstance(module, BackendLinear)]

    def watch_layers(self, count_layers: Callable[[int], object]) -> None:
        """Call `count_layers` in each forward pass with the number of layers that were just done."""
        watch_each(self.layers, count_layers)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, kv_caches: KVCaches) -> Tensor:
        """Return hidden_TE after the final norm; stores the step's keys and values in `kv_caches`."""
        self.current.inputs, self.current.kv_caches = inputs, kv_caches
        output = self._body[0](
            input_ids=inputs.token_ids_T.unsqueeze(0), position_ids=inputs.positions_T.unsqueeze(0), use_cache=False
        )
        hidden_TE: Tensor = output.last_hidden_state[0]
        return hidden_TE

    @torch.inference_mode()
    def compute_logits(self, hidden_SE: Tensor) -> Tensor:
        """Return logits_SV, float32, of the given rows of `forward`'s result."""
        output = self._head[0](inputs_embeds=hidden_SE.unsqueeze(0), use_cache=False)
        logits_SV: Tensor = output.logits[0].float()
        return logits_SV


class _GivenHidden(nn.Module):
    """Stands for a model's body whose hidden states are known."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> Any:
        return self._output(last_hidden_state=inputs_embeds)


def pack_products(model: Any, current: CurrentStep, *, rounded_bits: int | None, progress: Callable[[], None]) -> None:
    """Replace the linear layers of a causal model by packed ones, each letting go of its raw weight.

    Only modules whose forward is the plain product are replaced; the head's result is float32. Weights are rounded to
    `rounded_bits`, if it is set, except the head's and those that choose experts. `progress` is called
    after each layer.
    """
    head = model.get_output_embeddings()
    packed: dict[int, BackendLinear] = {}
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if not is_product(child):
                continue
            if id(child) not in packed:
                weight_NK = child.weight.detach().T.contiguous() if type(child) is Conv1D else child.weight.detach()
                bits = None if child is head else rounded_bits
                form = weight_NK if bits is None else _rounded(f"{path}.{name}", weight_NK, bits)
                packed[id(child)] = packed_linear(child, form, current, is_head=child is head)
                del child.weight  # a tied one stays with the embedding
                progress()
            setattr(parent, name, packed[id(child)])


def packed_linear(
    linear: Any, weight: Tensor | GroupwiseWeight, current: CurrentStep, *, is_head: bool
) -> BackendLinear:
    """Return what takes the place of a linear layer, given its weight (N outputs, K inputs) on its device."""
    device = weight.device if isinstance(weight, Tensor) else weight.codes_NB.device
    bias_N = None if linear.bias is None else linear.bias.detach().to(device)
    out_dtype = torch.float32 if is_head else None
    return BackendLinear(current.backend.pack_linear(weight, bias_N), linear.weight.detach(), current, out_dtype)


def _rounded(path: str, weight_NK: Tensor, bits: int) -> Tensor | GroupwiseWeight:
    """Return a weight in few bits, or as it is, saying why."""
    num_outputs, num_inputs = weight_NK.shape
    if may_choose_experts(path, num_outputs):
        logger.info("%s stays plain: with its %d outputs it may be what chooses experts", path, num_outputs)
        return weight_NK
    rounded = round_weight(weight_NK, bits)
    if rounded is None:
        logger.warning("%s stays plain: %d inputs are no multiple of 32", path, num_inputs)
        return weight_NK
    return rounded


def may_choose_experts(path: str, num_outputs: int) -> bool:
    """Return whether a linear layer may choose experts, by its path and size: rounding would harm such a layer
    most."""
    return num_outputs < FEWEST_ROUNDED_OUTPUTS or not ROUTERS.isdisjoint(path.split("."))


def is_product(module: nn.Module) -> bool:
    """Return whether the module's forward is the plain product with its weight, and a bias.

    Conv1D is GPT-2's name for a linear layer whose weight is transposed.
    """
    return type(module) in (nn.Linear, Conv1D)


def _with_module(model: nn.Module, path: list[str], replacement: nn.Module) -> Any:
    """Return a copy of `model` that shares everything with it except the module at `path`."""
    copied = copy.copy(model)
    copied._modules = dict(model._modules)
    name, *rest = path
    child = model._modules[name]
    assert child is not None
    copied._modules[name] = _with_module(child, rest, replacement) if rest else replacement
    return copied
