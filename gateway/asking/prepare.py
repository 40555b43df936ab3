"""Encodes and checks what is asked, resolves its sampling, and makes the engine's requests. Every door uses it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.gateway.asking.asked import Asked, AskedPrompt, AskedPrompts, Truncation
from octavo.gateway.asking.calling import call_grammar
from octavo.gateway.asking.division import followed_grammar, new_splitter, shown_token_ids
from octavo.gateway.asking.encode import MAX_TOKENS, PreparedPrompt, PromptTooLong, encode
from octavo.gateway.asking.model import ServedModel
from octavo.gateway.asking.sampling import context_length_exceeded, for_choice, resolve_sampling
from octavo.gateway.link.engine import EncodedPrompt, GenerationRequest
from octavo.gateway.parsing.parts import Splitter
from octavo.gateway.request_error import RequestError
from octavo.gateway.text.grammar import Grammar
from octavo.gateway.text.steps import Steps
from octavo.gateway.text.text_cuts import SLICE_CHARACTERS
from octavo.protocol.messages import excess_of_prompt_logprobs
from octavo.protocol.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Prepared:
    """`requests` has n choices of the first prompt, then n of the second, and so on; `splitters` has one for each."""

    prompts: list[PreparedPrompt]
    requests: list[GenerationRequest]
    splitters: list[Splitter]
    grammar: Grammar | None = None  # that the requests follow; whether it can be used is not known yet


def prepare(asked: Asked, model: ServedModel, request_id: str, tenant: str = "") -> Steps[Prepared]:
    """Return, in steps, the requests to start. Raises RequestError at the first prompt that is wrong.

    `request_id` is unique over the life of the process.
    """
    if "generate" not in model.ready.tasks:
        reason = "this model generates no text, it makes vectors: use /v1/embeddings"
        raise RequestError(reason, param="model", code="unsupported_task")
    if asked.tools is not None and asked.tools.must_call:
        asked = replace(asked, grammar=call_grammar(asked.tools, model))
    if asked.grammar is not None and not model.files.eos_token_ids:
        reason = "this model names no token that ends an answer, so that none could end where a grammar does"
        raise RequestError(reason, param=asked.grammar.param, code="unsupported_value")
    prompts, samplings, num_characters = [], [], 0
    for given in asked.prompts:
        room = model.ready.max_model_len - (asked.sampling.max_tokens or 1)
        prompt = yield from encode_within_context(given, asked, model, room)
        num_tokens, has_grammar = len(prompt.token_ids), asked.grammar is not None
        samplings.append(resolve_sampling(asked.sampling, model, num_tokens, asked.names, has_grammar=has_grammar))
        num_characters += len(prompt.token_ids) if prompt.text is None else len(prompt.text)
        prompts.append(prompt if asked.keeps_text else PreparedPrompt(None, prompt.token_ids))
        if num_characters >= SLICE_CHARACTERS:
            num_characters = 0
            yield
    splitters = [new_splitter(asked, model, prompt.token_ids) for prompt in prompts for _ in range(asked.n)]
    shown = shown_token_ids(asked, model)
    if asked.grammar is not None and prompts:
        asked = replace(asked, grammar=followed_grammar(asked, model, prompts[0].token_ids))
    return Prepared(prompts, _requests(asked, prompts, samplings, shown, request_id, tenant), splitters, asked.grammar)


def prepare_prompts(asked: Asked, model: ServedModel) -> Steps[list[PreparedPrompt]]:
    """Return, in steps, only the prompts, after all checks of `prepare`."""
    prepared = yield from prepare(asked, model, request_id="")
    return prepared.prompts


def encode_within_context(
    given: AskedPrompt, asked: AskedPrompts, model: ServedModel, room: int
) -> Steps[PreparedPrompt]:
    """Return, in steps, a prompt, truncated if that is asked for: `room` tokens leave room for the answer.

    Raises RequestError if the prompt is empty, or known to be longer than the context.
    """
    max_model_len, param = model.ready.max_model_len, asked.names.prompt
    max_tokens = max_model_len if asked.truncation is None else max(MAX_TOKENS, max_model_len)
    try:
        prompt = yield from encode(given, model, asked.names, max_tokens=max_tokens, keeps_text=asked.keeps_text)
    except PromptTooLong as error:
        raise context_length_exceeded(max_model_len, str(error), param) from None
    if asked.truncation is not None:
        prompt = _truncated(prompt, asked.truncation, max(1, room))
    if not prompt.token_ids:
        raise RequestError("the prompt is empty", param=param, code="invalid_value")
    return prompt


def _truncated(prompt: PreparedPrompt, truncation: Truncation, room: int) -> PreparedPrompt:
    """Return the prompt without the tokens that are too many. Its text is then that of its tokens."""
    num_tokens = room if truncation.max_tokens is None else truncation.max_tokens
    token_ids = prompt.token_ids
    if len(token_ids) <= num_tokens:
        return prompt
    kept = token_ids[len(token_ids) - num_tokens :] if truncation.keeps_end else token_ids[:num_tokens]
    return PreparedPrompt(None, kept)


def _requests(
    asked: Asked,
    prompts: Sequence[PreparedPrompt],
    samplings: Sequence[Sampling],
    shown_token_ids: frozenset[int],
    request_id: str,
    tenant: str,
) -> list[GenerationRequest]:
    for prompt, sampling in zip(prompts, samplings, strict=True):
        if excess := excess_of_prompt_logprobs(len(prompt.token_ids), sampling.num_prompt_logprobs):
            raise RequestError(excess, param=asked.names.prompt_logprobs, code="invalid_value")
    shared = [EncodedPrompt.of(f"{request_id}-{index}", prompt.token_ids) for index, prompt in enumerate(prompts)]
    return [
        GenerationRequest(
            request_id=f"{request_id}-{index * asked.n + choice}",
            prompt=prompt,
            sampling=for_choice(sampling, choice),
            stop=asked.sampling.stop,
            include_stop_str_in_output=asked.sampling.include_stop_str_in_output,
            skip_special_tokens=asked.sampling.skip_special_tokens,
            shown_token_ids=shown_token_ids,
            tenant=tenant,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            body_id=request_id,
            grammar=asked.grammar.text if asked.grammar else "",
        )
        for index, (prompt, sampling) in enumerate(zip(shared, samplings, strict=True))
        for choice in range(asked.n)
    ]
