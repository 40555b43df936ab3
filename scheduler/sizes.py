"""How many bytes a share takes at most in its Step and in the StepResult, since messages have a limit."""

from octavo.protocol.messages import logprob_bytes
from octavo.protocol.sampling import Sampling
from octavo.protocol.sockets import MAX_MESSAGE_BYTES
from octavo.scheduler.sequence import Sequence

MAX_STEP_BYTES = MAX_MESSAGE_BYTES // 2  # of both messages together; leaves room for what is not counted here
FRAME_BYTES = 256  # around a share and its result: numbers, lengths, the plain sampling parameters


def share_bytes(sequence: Sequence) -> int:
    """Return how many bytes a share of one token takes, with the present block table of the sequence."""
    num_alternatives = sequence.sampling.num_logprobs
    num_logprob_bytes = 0 if num_alternatives is None else logprob_bytes(num_alternatives)
    num_result_bytes = num_logprob_bytes + sequence.embedding_bytes
    return FRAME_BYTES + num_result_bytes + sequence.token_bytes + len(sequence.packed_block_table)


def token_bytes(sampling: Sampling) -> int:
    """Return how many bytes each further token of a share takes."""
    return 4 + (0 if sampling.num_prompt_logprobs is None else logprob_bytes(sampling.num_prompt_logprobs))


def init_bytes(sequence: Sequence) -> int:
    """Return how many bytes the SequenceInit of a sequence takes."""
    sampling = sequence.sampling
    num_ids = len(sampling.eos_token_ids) + len(sampling.stop_token_ids) + 3 * len(sampling.logit_bias)
    if sequence.init_has_output:
        num_ids += len(sequence.output_token_ids)
    if sequence.prompt_logprobs is not None:
        num_ids += len(sequence.prompt_token_ids)
    num_distinct_bytes = len(sequence.prompt.distinct_token_ids()) if sampling.repetition_penalty != 1.0 else 0
    return 5 * num_ids + num_distinct_bytes + len(sequence.grammar.encode())
