"""When a sequence ends, by integers alone: stop ids, `min_tokens`, `max_tokens`, `max_model_len`."""

from octavo.scheduler.sequence import Sequence


def finish_reason(sequence: Sequence) -> str | None:
    """Return how the last token ends the sequence ("stop" before "length"), or None if it goes on."""
    outputs = sequence.output_token_ids
    if outputs and outputs[-1] in sequence.stop_token_ids and _may_stop(sequence):
        return "stop"
    if sequence.num_tokens >= sequence.max_num_tokens:
        return "length"
    return None


def _may_stop(sequence: Sequence) -> bool:
    """Whether a stop id ends the sequence: a grammar that allows nothing but an end comes before `min_tokens`."""
    outputs, sampling = sequence.output_token_ids, sequence.sampling
    is_complete = bool(sequence.grammar) and outputs[-1] in sampling.eos_token_ids
    return is_complete or len(outputs) >= sampling.min_tokens


def append_tokens(sequence: Sequence, token_ids: list[int]) -> tuple[list[int], str | None]:
    """Append tokens up to the first that ends the sequence; return the appended tokens and the finish reason."""
    outputs, num_tokens = sequence.output_token_ids, sequence.num_tokens
    for token_id in token_ids:
        outputs.append(token_id)
        sequence.num_tokens += 1
        may_end = token_id in sequence.stop_token_ids or sequence.num_tokens >= sequence.max_num_tokens
        if may_end and (reason := finish_reason(sequence)):
            return token_ids[: sequence.num_tokens - num_tokens], reason
    return token_ids, None
