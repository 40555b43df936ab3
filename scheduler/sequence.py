"""One running generation, and its shares in the steps in flight."""

from array import array
from dataclasses import dataclass, field

from protocol.messages import Attachment
from protocol.sampling import SamplingParams


def no_ids() -> "array[int]":
    return array("i")


@dataclass(slots=True, eq=False)
class Sequence:
    """What the server makes of a Submit. `output_token_ids` grows; the server may read it, never change it."""

    seq_id: int
    prompt_token_ids: "array[int]"  # int32
    sampling: SamplingParams
    output_token_ids: "array[int]" = field(default_factory=no_ids)  # int32; at the start, what a resubmission has
    task: str = "generate"
    tenant: str = ""
    priority: int = 0  # lower goes first
    cache_salt: str = ""
    adapter: str = ""
    attachments: tuple[Attachment, ...] = ()
