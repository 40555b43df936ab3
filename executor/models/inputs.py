"""What the model needs to know of one step, as tensors on the device."""

from dataclasses import dataclass

from torch import Tensor

# T tokens of this step, S sequences, M blocks of the longest block table


@dataclass(frozen=True, slots=True)
class StepInputs:
    """T tokens of S sequences, packed without padding: prompt chunks and single tokens alike."""

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64, of each token in its own sequence
    slot_mapping_T: Tensor  # int64: block * block_size + offset where the token's key and value go
    cu_seqlens_q: Tensor  # int32, S + 1 offsets into T
    seq_lens_S: Tensor  # int32, tokens with KV, this step's included
    block_tables_SM: Tensor  # int32, padded with 0

    def require_rows(self, x_TE: Tensor) -> None:
        """Raise ValueError if the rows of `x_TE` cannot be the step's tokens."""
        if len(x_TE) != len(self.token_ids_T):
            raise ValueError(f"{len(x_TE)} rows in a step of {len(self.token_ids_T)} tokens")
