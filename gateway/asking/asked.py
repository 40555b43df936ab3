"""What a caller asks for, independent of any API. Each door converts its body to `Asked`; `prepare` makes requests."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.gateway.text.grammar import Grammar


@dataclass(frozen=True, slots=True)
class PromptText:
    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class PromptTokens:
    token_ids: list[int]
    text: str | None = None  # the text of the tokens; None: the caller does not need it


@dataclass(frozen=True, slots=True)
class PromptMessages:
    """A conversation for the chat template. Each message has a `role`, a `content` and perhaps a `name`.

    An assistant's message may have `tool_calls` (of which `arguments` are an object) and `reasoning_content`; one of a
    tool has a `tool_call_id`. `tools` are the definitions, as in OpenAI's API.
    """

    messages: Sequence[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] | None = None
    tools: Sequence[dict[str, Any]] = ()
    reasoning_effort: str | None = None


AskedPrompt = PromptText | PromptTokens | PromptMessages


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """The caller's names of the fields that an error can name."""

    prompt: str = "prompt"
    max_tokens: str = "max_tokens"
    logprobs: str = "logprobs"
    prompt_logprobs: str = "prompt_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSampling:
    """How to choose tokens. None: the value of the model's generation config, or else the default of OpenAI's API."""

    max_tokens: int | None = None
    default_max_tokens: int | None = None  # if neither the caller nor the model sets it; None: all that fit
    cuts_max_tokens: bool = False  # if max_tokens do not fit: generate as many as fit, instead of an error
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None  # of either sign, 64 bits; None: each prompt gets its own
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class AskedTool:
    name: str
    parameters: Mapping[str, Any] | None = None  # a JSON schema; None: no arguments


@dataclass(frozen=True, slots=True)
class AskedTools:
    """The tools that an answer may call, all of which the prompt describes."""

    tools: Sequence[AskedTool]
    must_call: bool = False  # the answer is one call or several
    only: str | None = None  # with `must_call`: the one tool to call
    is_parallel: bool = True  # several calls in one answer


@dataclass(frozen=True, slots=True)
class Truncation:
    """How many tokens of a prompt to keep at most, and from which side the others are taken."""

    max_tokens: int | None  # None: as many as leave room for the answer
    keeps_end: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPrompts:
    """Prompts alone. `prompts` may be lazy: a thread reads it."""

    prompts: Iterable[AskedPrompt]
    names: FieldNames = FieldNames()
    keeps_text: bool = False  # the answer shows the text of the prompts
    truncation: Truncation | None = None  # None: a prompt that is too long is an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(AskedPrompts):
    """`n` answers to each prompt."""

    sampling: AskedSampling
    n: int = 1
    cache_salt: str = ""
    priority: int = 0  # lower goes first
    divides: bool = False  # the thinking of an answer and its calls are parts of their own
    tools: AskedTools | None = None
    grammar: Grammar | None = None  # that each answer follows
