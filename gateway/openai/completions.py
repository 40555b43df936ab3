"""Completions: a body of `/v1/completions` becomes `Asked`, and events become the answer."""

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from octavo.gateway.asking.asked import Asked, FieldNames, PromptText, PromptTokens
from octavo.gateway.asking.encode import PreparedPrompt
from octavo.gateway.asking.events import Answer, Event
from octavo.gateway.openai.answer_types import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs, Usage
from octavo.gateway.openai.answers import Heading, Renderer, asked_sampling, truncation
from octavo.gateway.openai.logprobs import CompletionLogprobsWriter, joined, prompt_logprobs
from octavo.gateway.openai.structured import asked_grammar
from octavo.gateway.openai.types import MAX_CHOICES, CompletionRequest, check_common, wanted_tokens
from octavo.gateway.parsing.parts import Content, Part
from octavo.gateway.request_error import RequestError
from octavo.gateway.text.delta import TokenLogprob
from octavo.gateway.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


def ask_completion(body: CompletionRequest) -> Asked:
    """Return what the body asks for. Raises RequestError for faults that decoding by type cannot find."""
    check_common(body)
    max_tokens, asked_by = wanted_tokens(body)
    if max_tokens == 0 and not body.echo:
        raise RequestError(f"{asked_by} must be at least 1 (0 needs echo)", param=asked_by, code="invalid_value")
    return Asked(
        prompts=_prompts(body),
        sampling=asked_sampling(
            body,
            max_tokens=max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            num_logprobs=body.logprobs,
            num_prompt_logprobs=_num_prompt_logprobs(body),
        ),
        n=body.n or 1,
        names=FieldNames(max_tokens=asked_by, prompt_logprobs="logprobs" if body.echo else "prompt_logprobs"),
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        truncation=truncation(body),
        keeps_text=bool(body.echo),
        grammar=asked_grammar(body),
    )


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """Return of how many likeliest tokens the prompt's tokens have log probabilities. Raises RequestError."""
    echoed = body.logprobs if body.echo else None
    if None not in (echoed, body.prompt_logprobs) and echoed != body.prompt_logprobs:
        complaint = "with echo, logprobs and prompt_logprobs must agree"
        raise RequestError(complaint, param="prompt_logprobs", code="invalid_value")
    return body.prompt_logprobs if echoed is None else echoed


def _prompts(body: CompletionRequest) -> Iterator[PromptText | PromptTokens]:
    adds = body.add_special_tokens is not False
    for given in split_prompts(body.prompt, body.n or 1):
        yield PromptText(given, adds) if isinstance(given, str) else PromptTokens(given)


def split_prompts(prompt: Any, n: int = 1, *, name: str = "prompt", most: int = MAX_CHOICES) -> list[str | list[int]]:
    """Return the prompts in a string, a list of strings, a list of token ids or a list of such lists.

    Raises RequestError that names the place of any other value, or if prompts x n are more than `most` choices.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise _wrong_prompt(name)
    if not prompt:
        raise RequestError(f"{name} is empty", param=name, code="invalid_value")
    if type(prompt[0]) is int:
        return [_integers(prompt, name)]
    if len(prompt) * n > most:
        message = f"{len(prompt)} prompts with n {n} make more than {most} choices"
        raise RequestError(message, param="n" if n > 1 else name, code="invalid_value")
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if type(item) is not kind or kind not in (str, list):
            raise _wrong_prompt(f"{name}[{index}]")
    return prompt if kind is str else [_integers(item, f"{name}[{i}]") for i, item in enumerate(prompt)]


def _integers(items: list[Any], path: str) -> list[int]:
    if not items:
        raise RequestError(f"{path} is empty", param=path, code="invalid_value")
    if set(map(type, items)) != {int}:
        index = next(index for index, item in enumerate(items) if type(item) is not int)
        raise _wrong_prompt(f"{path}[{index}]")
    return items


def _wrong_prompt(path: str) -> RequestError:
    message = f"{path}: a prompt is a string, a list of strings, a list of token ids or a list of such lists"
    return RequestError(message, param=path, code="invalid_type")


class CompletionRenderer(Renderer):
    chunk_object = "text_completion"

    def __init__(
        self, body: CompletionRequest, heading: Heading, prompts: Sequence[PreparedPrompt], tokenizer: Tokenizer
    ) -> None:
        has_logprobs, self._echoes = body.logprobs is not None, bool(body.echo)
        is_long = has_logprobs or self._echoes or body.prompt_logprobs is not None
        super().__init__(body, heading, prompts, tokenizer, has_logprobs=has_logprobs, is_long=is_long)
        skips = body.skip_special_tokens is not False
        self._writers = [
            CompletionLogprobsWriter(tokenizer, skip_special_tokens=skips, names_ids=self.names_ids) for _ in prompts
        ]
        self._has_prompt_logprobs = body.prompt_logprobs is not None

    def completed(self, answers: Sequence[Answer], usage: Usage) -> Completion:
        head = self.heading
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=usage,
        )

    def first(self, event: Event) -> CompletionChoice | None:
        """Return the choice that repeats the prompt, if the body asks for an echo or for the prompt's tokens."""
        echoed = self._echo(event.choice, event.delta.prompt_logprobs)
        if not self.has_token_ids:
            return echoed
        echoed = echoed or CompletionChoice(event.choice, "")
        echoed.token_ids, echoed.prompt_token_ids = [], self.prompts[event.choice].token_ids
        return echoed

    def text(self, choice: int, text: str) -> CompletionChoice:
        return CompletionChoice(choice, text)

    def more(self, event: Event, part: Part | None) -> CompletionChoice:
        delta = event.delta
        return CompletionChoice(
            index=event.choice,
            text=part.text if isinstance(part, Content) else "",
            logprobs=self._logprobs(event.choice, delta.token_ids, delta.logprobs or []),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self.has_token_ids else UNSET,
        )

    def _choice(self, index: int, answer: Answer) -> CompletionChoice:
        whole = answer.whole
        echoed = self._echo(index, whole.prompt_logprobs)
        text, logprobs = answer.content, self._logprobs(index, whole.token_ids, whole.logprobs or [])
        if echoed:
            text = echoed.text + text
            logprobs = joined(echoed.logprobs, logprobs) if echoed.logprobs and logprobs else logprobs
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=whole.finish_reason,
            stop_reason=whole.stop_reason,
            token_ids=whole.token_ids if self.has_token_ids else UNSET,
            prompt_token_ids=self.prompts[index].token_ids if self.has_token_ids else UNSET,
            prompt_logprobs=self._prompt_logprobs(whole.prompt_logprobs),
        )

    def _echo(self, index: int, prompt_logprobs: list[TokenLogprob | None] | None) -> CompletionChoice | None:
        if not self._echoes:
            return None
        prompt = self.prompts[index]
        text = prompt.text
        if text is None:  # given as token ids: the special tokens are a part of the prompt
            text = self.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        if not self.has_logprobs:
            return CompletionChoice(index, text)
        return CompletionChoice(
            index, text, self._writers[index].write_prompt(text, prompt.token_ids, prompt_logprobs or [])
        )

    def _prompt_logprobs(self, given: list[TokenLogprob | None] | None) -> PromptLogprobs | UnsetType:
        return prompt_logprobs(given or [], self.tokenizer) if self._has_prompt_logprobs else UNSET

    def _logprobs(
        self, index: int, token_ids: list[int], logprobs: Sequence[TokenLogprob]
    ) -> CompletionLogprobs | None:
        return self._writers[index].write(token_ids, logprobs) if self.has_logprobs else None
