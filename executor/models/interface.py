"""What both tiers of models are to the rest of the executor: a description before the weights, and a model after."""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from octavo.executor.models.inputs import StepInputs
from octavo.executor.models.kv_caches import KVCaches, KVShape
from octavo.executor.quantization import Quantization
from octavo.kernels.backend import PackedLinear

# T tokens of this step, S rows, E hidden size, V vocabulary


class ModelDescription(Protocol):
    """A checkpoint's architecture, known without its weights; frozen."""

    @property
    def architecture(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype:
        """The checkpoint's."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def default_max_model_len(self) -> int:
        """The longest sequence, in tokens, that is served unless the settings ask for more."""

    @property
    def longest_sequence_tokens(self) -> int:
        """The longest sequence that the model can be made to serve."""

    @property
    def quantization(self) -> Quantization | None:
        """How the checkpoint stores its weights, if not plainly."""

    @property
    def kv_shapes(self) -> list[KVShape]:
        """Each layer's (num_kv_heads, key_head_size, value_head_size), of the whole model."""

    def frequencies(self, max_model_len: int) -> str:
        """Return the rotary frequencies that depend on `max_model_len`, as text: equal frequencies give equal text."""


class Model(Protocol):
    """A causal language model over a paged KV cache: what the runner runs, in torch's inference mode."""

    def forward(self, inputs: StepInputs, kv_caches: KVCaches) -> Tensor:
        """Return hidden_TE after the final norm; stores the step's keys and values in `kv_caches`."""

    def compute_logits(self, hidden_SE: Tensor) -> Tensor:
        """Return logits_SV, float32, of the given rows of `forward`'s result.

        All ranks must ask for them; only rank 0's are of the whole vocabulary.
        """


class LoadedModel(Model, Protocol):
    """A Model that was read from a checkpoint, as the executor's start knows it."""

    num_layers: int
    vocab_size: int
    hidden_size: int

    @property
    def kv_shapes(self) -> list[KVShape]:
        """Each layer's (num_kv_heads, key_head_size, value_head_size), of this rank; none in an encoder."""

    @property
    def layers(self) -> Iterable[nn.Module]:
        """One module for each layer, called once in a forward pass."""

    @property
    def products(self) -> list[PackedLinear]:
        """The backend's forms of the weights, each once."""

    def watch_layers(self, count_layers: Callable[[int], object]) -> None:
        """Call `count_layers` in each forward pass with the number of layers that were just done."""

    def parameters(self) -> Iterable[Tensor]:
        """Return the weights that are not in `products`."""


def watch_each(layers: Iterable[nn.Module], count_layers: Callable[[int], object]) -> None:
    """Call `count_layers` with 1 after each call of one of the layers."""

    def count(*_: object) -> None:
        count_layers(1)

    for layer in layers:
        layer.register_forward_hook(count)
