"""The official client, used as its users do."""

import asyncio

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from octavo.protocol.messages import Rejected
from tests.fakes.gateway_server import MODEL, Served
from tests.fakes.model_directories import IM_END, text_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "blue"}]},
]


async def test_chat(served: Served) -> None:
    served.scheduler.reply = lambda submit: [*text_ids("blue"), IM_END]
    answer = await served.openai.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0.9,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        stop=["END", "\n\n"],
        seed=1,
        extra_body={"repetition_penalty": 1.1, "top_k": 40, "min_p": 0.05},
    )
    assert answer.choices[0].message.content == "blue"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens_details is not None


async def test_a_stream_read_without_a_guard(served: Served) -> None:
    served.scheduler.reply = lambda submit: [*text_ids("blue 🫠"), IM_END]
    stream = await served.openai.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content
    assert text == "blue 🫠"


async def test_a_stream_with_usage(served: Served) -> None:
    stream = await served.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, max_tokens=5, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


async def test_logprobs_and_choices(served: Served) -> None:
    answer = await served.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=3, max_tokens=4, seed=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [3] * 4


async def test_a_seed_repeats(served: Served) -> None:
    texts = {
        (
            await served.openai.chat.completions.create(
                model=MODEL, messages=MESSAGES, seed=seed, max_tokens=12, temperature=1.0
            )
        )
        .choices[0]
        .message.content
        for seed in (42, 42, 43, 43)
    }
    assert len(texts) == 2


async def test_completions(served: Served) -> None:
    answer = await served.openai.completions.create(
        model=MODEL, prompt=["a", "b"], max_tokens=3, echo=True, logprobs=1, stop="zzz"
    )
    assert [choice.text[0] for choice in answer.choices] == ["a", "b"]
    stream = await served.openai.completions.create(model=MODEL, prompt=[5, 6], max_tokens=3, stream=True)
    assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "length"


async def test_errors_are_the_client_s_exceptions(served: Served) -> None:
    create = served.openai.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model=MODEL, messages=MESSAGES, temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="gpt-9", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    served.scheduler.rejection = lambda submit: Rejected(submit.request_id, "full", 1.0)
    with pytest.raises(openai.RateLimitError):
        await create(model=MODEL, messages=MESSAGES, stream=True)


async def test_models(served: Served) -> None:
    models = await served.openai.models.list()
    assert [model.id for model in models.data] == [MODEL, "alias"]
    assert (await served.openai.models.retrieve("alias")).owned_by == "octavo"
    with pytest.raises(openai.NotFoundError):
        await served.openai.models.retrieve("another")


async def test_ten_at_once(served: Served) -> None:
    async def ask(seed: int) -> str | None:
        answer = await served.openai.chat.completions.create(model=MODEL, messages=MESSAGES, seed=seed, max_tokens=20)
        return answer.choices[0].message.content

    together = await asyncio.gather(*(ask(seed) for seed in range(10)))
    assert together == [await ask(seed) for seed in range(10)]
    assert len(set(together)) == 10
