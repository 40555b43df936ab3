"""When a sequence ends, judged on integers: stop ids, `min_tokens`, `max_tokens`, `max_model_len`."""

from collections.abc import Iterable

from protocol.messages import Logprobs
from scheduler.sequence import Sequence


def finish_reason(sequence: Sequence) -> str | None:
    """Return how the last token ends the sequence ("stop" before "length"), or None if it goes on."""
    outputs = sequence.output_token_ids
    if outputs and outputs[-1] in sequence.stop_token_ids and len(outputs) >= sequence.sampling.min_tokens:
        return "stop"
    if sequence.num_tokens >= sequence.max_num_tokens:
        return "length"
    return None


def append_tokens(sequence: Sequence, token_ids: Iterable[int]) -> tuple[list[int], str | None]:
    """Append tokens up to the first that ends the sequence; return those appended and the finish reason."""
    appended: list[int] = []
    for token_id in token_ids:
        sequence.output_token_ids.append(token_id)
        sequence.num_tokens += 1
        appended.append(token_id)
        if reason := finish_reason(sequence):
            return appended, reason
    return appended, None


def head(logprobs: Logprobs, num_tokens: int) -> Logprobs:
    """Return the log probabilities of the first `num_tokens` tokens."""
    row, wide = 4 * num_tokens, 4 * num_tokens * logprobs.num_alternatives
    return Logprobs(
        logprobs.num_alternatives,
        logprobs.token_logprobs[:row],
        logprobs.token_ranks[:row],
        logprobs.top_token_ids[:wide],
        logprobs.top_logprobs[:wide],
    )
