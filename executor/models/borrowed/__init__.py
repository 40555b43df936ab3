"""The second tier: architectures that run through transformers' own modelling code, with our attention and products.

`config` finds out what a checkpoint's architecture does, without its weights, and refuses what cannot be served;
`attention` is where its layers meet the paged cache; `decoder` is what the runner runs; `loading` fills it and lets it
prove itself against transformers' own attention. Importing this package imports transformers' modelling code: seconds.
"""

from octavo.executor.models.borrowed.config import BorrowedConfig, read_borrowed_config
from octavo.executor.models.borrowed.decoder import BorrowedDecoder
from octavo.executor.models.borrowed.encoder import (
    Encoder,
    EncoderConfig,
    is_encoder,
    load_encoder,
    read_encoder_config,
)
from octavo.executor.models.borrowed.loading import load_borrowed

__all__ = [
    "BorrowedConfig",
    "BorrowedDecoder",
    "Encoder",
    "EncoderConfig",
    "is_encoder",
    "load_borrowed",
    "load_encoder",
    "read_borrowed_config",
    "read_encoder_config",
]
