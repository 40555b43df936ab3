"""A model without weights: the next token is a pure function of the seed and all tokens before it."""

import zlib
from array import array
from collections.abc import Sequence

from octavo.protocol.messages import Logprobs, pack_ids
from octavo.protocol.sampling import Sampling

VOCAB_SIZE = 1000
EMBEDDING_SIZE = 4
EOS_TOKEN_ID = 0
EOS_ONE_IN = 40  # tokens, so that unbounded outputs have random lengths


def next_token(token_ids: Sequence[int], seed: int) -> int:
    """Return the token that follows `token_ids`: the end of sequence in one of EOS_ONE_IN cases."""
    drawn = zlib.crc32(pack_ids(token_ids), seed & 0xFFFFFFFF)
    return EOS_TOKEN_ID if drawn % EOS_ONE_IN == 0 else 1 + drawn // EOS_ONE_IN % (VOCAB_SIZE - 1)


def expected_output(
    prompt_token_ids: Sequence[int], sampling: Sampling, max_model_len: int = 1 << 30
) -> tuple[list[int], str]:
    """Return all output tokens of a request, and why it ends."""
    token_ids = list(prompt_token_ids)
    while (num_output_tokens := len(token_ids) - len(prompt_token_ids)) < sampling.max_tokens:
        if len(token_ids) >= max_model_len:
            break
        token_ids.append(next_token(token_ids, sampling.seed))
        is_stop = token_ids[-1] in sampling.eos_token_ids or token_ids[-1] in sampling.stop_token_ids
        if is_stop and num_output_tokens + 1 > sampling.min_tokens:
            return token_ids[len(prompt_token_ids) :], "stop"
    return token_ids[len(prompt_token_ids) :], "length"


def logprobs_of(token_ids: Sequence[int], num_alternatives: int) -> Logprobs:
    """Return numbers that name the token: logprob -(id % 7) - 0.5, rank id + 1, alternatives id + 1, id + 2, ..."""
    tops = [[token_id + k for k in range(1, num_alternatives + 1)] for token_id in token_ids]
    return Logprobs(
        num_alternatives,
        array("f", [-(token_id % 7) - 0.5 for token_id in token_ids]).tobytes(),
        pack_ids(token_id + 1 for token_id in token_ids),
        pack_ids(top for row in tops for top in row),
        array("f", [-0.25 * k for _ in token_ids for k in range(1, num_alternatives + 1)]).tobytes(),
    )


def embedding_of(token_ids: Sequence[int]) -> bytes:
    """Return the vector of a prompt: float32 numbers that a test can compute."""
    return array("f", [len(token_ids), sum(token_ids), token_ids[-1], token_ids[0]]).tobytes()
