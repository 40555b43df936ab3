"""From a Submit to a Sequence. Refuses what only the scheduler can know, and what would crash an executor. Pure."""

from array import array
from collections.abc import Collection

from octavo.protocol.messages import Submit, unpack_ids
from octavo.scheduler.sequence import Prompt, Sequence


class SubmitError(ValueError):
    """Why the request can never be served."""


def make_prompt(submit: Submit, vocab_size: int) -> Prompt:
    """Return the prompt that `submit` brings. Raises SubmitError if it is empty or has an unknown id."""
    prompt_token_ids = _ids(submit.prompt_token_ids, "prompt_token_ids", vocab_size)
    if not prompt_token_ids:
        raise SubmitError("the prompt has no tokens")
    return Prompt(prompt_token_ids)


def make_sequence(submit: Submit, prompt: Prompt, seq_id: int, vocab_size: int) -> Sequence:
    """Return the sequence that `submit` asks for. Raises SubmitError for an id that is not in the vocabulary."""
    sampling = submit.sampling
    _require_known("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _require_known("logit_bias", [token_id for token_id, _ in sampling.logit_bias], vocab_size)
    return Sequence(
        seq_id=seq_id,
        prompt=prompt,
        sampling=sampling,
        output_token_ids=_ids(submit.output_token_ids, "output_token_ids", vocab_size),
        tenant=submit.tenant,
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        body_id=submit.body_id,
        task=submit.task,
        grammar=submit.grammar,
    )


def _ids(packed: bytes, name: str, vocab_size: int) -> "array[int]":
    try:
        token_ids = unpack_ids(packed)
    except ValueError:
        raise SubmitError(f"{name} is not a whole number of int32") from None
    _require_known(name, token_ids, vocab_size)
    return token_ids


def _require_known(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise SubmitError(f"{name} has {token_id}, which is not in the vocabulary of {vocab_size} tokens")
