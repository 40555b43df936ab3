"""The Llama family's decoder, on one page."""

from torch import Tensor, nn

from executor.inputs import StepInputs

# T tokens of this step, S sequences, E hidden size, V vocabulary


class Decoder(nn.Module):
    """A causal language model over a paged KV cache."""

    num_layers: int
    vocab_size: int

    @property
    def kv_shapes(self) -> list[tuple[int, int, int]]:
        """Return each layer's (num_kv_heads, key_head_size, value_head_size), of this rank."""
        raise NotImplementedError

    def forward(self, inputs: StepInputs, kv_caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return hidden_TE after the final norm; stores the step's keys and values in `kv_caches` (a layer each)."""
        raise NotImplementedError

    def compute_logits(self, hidden_SE: Tensor) -> Tensor:
        """Return logits_SV, float32, of the given rows of `forward`'s result."""
        raise NotImplementedError
