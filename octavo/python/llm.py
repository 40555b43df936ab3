"""`LLM`: generates in scripts and notebooks, synchronously, many prompts at a time."""

import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any

from tqdm import tqdm

from octavo.python.local_engine import LocalEngine
from octavo.python.outputs import EmbeddingRequestOutput, RequestOutput
from octavo.python.preparation import (
    Conversation,
    PreparedRequest,
    Prompt,
    naming,
    one_each,
    split_conversations,
    split_prompts,
)
from octavo.python.sampling_params import SamplingParams
from octavo.python.settings import config_of, wants_http, with_settings


@with_settings
class LLM:
    """A model: a directory, a Hugging Face id, a .gguf file, or the demo model if none is named.

    It is ready once constructed, and ends with the script, with `close()`, with a `with` block, or with its last
    reference. Any number of threads may use it at once; their requests share batches. Settings are keywords; the
    variables of `octavo serve` (OCTAVO_MAX_NUM_SEQS=8) count too. A keyword wins, and None leaves a setting unchanged.
    If host, port, metrics_port or api_key is a keyword, the model is also served over HTTP, like with `octavo serve`,
    for as long as the object lives.
    Raises TypeError for an unknown keyword, ValueError for a model or a value that cannot be used, and
    octavo.errors.LaunchError, with the cause, if it does not start.
    """

    def __init__(self, model: "str | os.PathLike[str] | None" = None, **settings: Any) -> None:
        self._engine = LocalEngine(config_of("LLM", model, settings), serves_http=wants_http(settings))
        self._engine.start()
        weakref.finalize(self, self._engine.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return the model's continuation of each prompt, in order.

        A prompt is a string (no chat template is applied, and no second BOS added), `{"prompt": ...}`, a list or array
        of token ids or `{"prompt_token_ids": ...}`; give one prompt or a list. `sampling_params` is one object for all
        prompts, or a list with one for each. Raises ValueError for a wrong or too long prompt, before it generates.
        """
        prepare = self._engine.preparation.of_prompt
        requests = _each(prepare, split_prompts(prompts), sampling_params, "prompts")
        return self._complete(requests, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Return the answer to each conversation, in order.

        `messages` is a list of `{"role": ..., "content": ...}` or a list of such lists; the model's chat template turns
        each into a prompt, which describes `tools` (as in OpenAI's API). Thinking and calls stay in the text.
        Everything else is as for `generate`.
        """
        prepare = functools.partial(
            self._engine.preparation.of_chat,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
        )
        requests = _each(prepare, split_conversations(messages), sampling_params, "messages")
        return self._complete(requests, use_tqdm)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True) -> list[EmbeddingRequestOutput]:
        """Return the vector of each prompt, in order: `output.outputs.embedding` is a list of numbers.

        Prompts are as for `generate`. Raises ValueError for a wrong or too long prompt, or a model without vectors.
        """
        requests = []
        items = split_prompts(prompts)
        for index, item in enumerate(items):
            with naming(f"prompts[{index}]") if len(items) > 1 else nullcontext():
                requests.append(self._engine.preparation.of_text(item))
        with _bar_of(len(requests), "Embedding", use_tqdm) as when_finished:
            return self._engine.result(self._engine.submit(self._engine.generating.embed(requests, when_finished)))

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the defaults of the model's generation_config.json (or else config.json) as new SamplingParams."""
        return self._engine.preparation.default_sampling_params()

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, loaded by transformers, which may import torch into this process.

        Raises ValueError if transformers cannot load it.
        """
        from transformers import AutoTokenizer

        config = self._engine.config
        try:
            return AutoTokenizer.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
        except OSError as error:
            raise ValueError(str(error)) from error

    def close(self) -> None:
        """End the model and its processes; an interruption kills them. Nothing can be generated afterwards."""
        self._engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _complete(self, requests: Sequence[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
        with _bar_of(len(requests), "Generating", use_tqdm) as when_finished:
            return self._engine.result(self._engine.submit(self._engine.generating.complete(requests, when_finished)))


def _no_bar() -> None:
    """Show nothing. Even a disabled bar would start tqdm's thread, which outlives the model."""


@contextmanager
def _bar_of(num_requests: int, title: str, use_tqdm: bool) -> Iterator[Callable[[], object]]:
    """Show a bar for several requests; yield a function to call when a request is finished."""
    if not use_tqdm or num_requests < 2:
        yield _no_bar
        return
    with tqdm(total=num_requests, desc=title, unit="prompt") as bar:
        yield bar.update


def _each(
    prepare: Callable[[Any, SamplingParams], PreparedRequest],
    items: Sequence[Any],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    name: str,
) -> list[PreparedRequest]:
    """Return the prepared request of each item. With several items, an error names the wrong one."""
    samplings = one_each(sampling_params, len(items))
    requests = []
    for index, (item, sampling) in enumerate(zip(items, samplings, strict=True)):
        with naming(f"{name}[{index}]") if len(items) > 1 else nullcontext():
            requests.append(prepare(item, sampling))
    return requests
