"""A gateway over a model of a chosen chat template, and what such models say."""

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.fakes.fake_scheduler import FakeScheduler, Reply
from tests.fakes.gateway_server import Served, serving
from tests.fakes.model_directories import IM_END, VOCAB_SIZE, text_ids, write_tiny_model

MESSAGES = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
START = "{% if add_generation_prompt %}<|im_start|>assistant\n"
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
QWEN = f"{MESSAGES}{START}{SWITCH}{{% endif %}}"
R1 = f"{MESSAGES}{START}<think>\n{{% endif %}}{{# </think> #}}"
HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant{# <|channel|>analysis<|message|> #}"
)


def saying(text: str) -> Reply:
    return lambda submit: [*text_ids(text), IM_END]


def harmony_ids(text: str) -> list[int]:
    """Return the ids of a text with harmony's control tokens."""
    for number, token in enumerate(HARMONY_TOKENS):
        before, found, behind = text.partition(token)
        if found:
            return [*harmony_ids(before), VOCAB_SIZE + number, *harmony_ids(behind)]
    return text_ids(text)


@asynccontextmanager
async def serving_template(
    template: str, *, tokens: Sequence[str] = (), max_model_len: int = 4096, **settings: Any
) -> AsyncIterator[Served]:
    """Serve the tiny model with a template; `tokens` are special tokens that it has besides."""
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny_model(Path(directory, "model"), more_control_tokens=tokens)
        vocab_size = VOCAB_SIZE + len(tokens)
        scheduler = FakeScheduler(f"ipc://{directory}/s", vocab_size=vocab_size, max_model_len=max_model_len)
        async with serving(model, scheduler, chat_template=template, **settings) as served:
            yield served


def with_tools(sign: str) -> str:
    """Return a template that shows tools, calls and their results; `sign` says how its model writes calls."""
    return (
        f"{{# {sign} #}}{{% if tools %}}<tools>{{{{ tools | tojson }}}}</tools>{{% endif %}}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{% for call in m.tool_calls or [] %}"
        "<made>{{ call.function.name }} {{ call.function.arguments | tojson }}</made>"
        "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
