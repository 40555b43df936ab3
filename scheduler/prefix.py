"""What a KV block's content depends on, as one strong hash: equal hashes mean that the block can be shared.

The chain starts from who may share at all (tenant, cache salt, adapter); each block adds its token ids and whatever
stands in for some of them. Every part is framed by its kind and length, so that no two different lists of parts
have the same bytes: a cache salt that reads like an adapter's name is still a cache salt.
"""

import hashlib
import struct
from collections.abc import Iterable

from protocol.messages import Attachment


def root_hash(tenant: str, cache_salt: str, adapter: str) -> bytes:
    """Return the 32 bytes from which the chain of a sequence's blocks starts."""
    parts = (("tenant", tenant), ("cache_salt", cache_salt), ("adapter", adapter))
    return hashlib.sha256(b"".join(_frame(kind, value.encode()) for kind, value in parts)).digest()


def block_hash(
    parent: bytes, token_ids: bytes, first_token_index: int = 0, attachments: Iterable[Attachment] = ()
) -> bytes:
    """Return the 32 bytes that stand for a full block and all that comes before it.

    `token_ids` are int32; `first_token_index` is the block's place in the sequence, which tells the attachments that
    reach into it from the others.
    """
    end = first_token_index + len(token_ids) // 4
    parts = [parent, _frame("token_ids", token_ids)]
    for attachment in attachments:
        first, num_tokens = attachment.first_token_index, attachment.num_tokens
        if first < end and first + num_tokens > first_token_index:
            span = struct.pack("<qq", first - first_token_index, num_tokens)
            parts.append(_frame("attachment", span + attachment.digest))
    return hashlib.sha256(b"".join(parts)).digest()


def _frame(kind: str, value: bytes) -> bytes:
    return struct.pack("<16sq", kind.encode(), len(value)) + value
