"""What callers hand over becomes token ids and sampling, or an error that says what is wrong."""

import msgspec
import numpy as np
import pytest

from octavo.gateway.text.model_files import ModelFiles, read_model_files
from octavo.protocol.config import Config
from octavo.protocol.messages import Ready
from octavo.python.preparation import Preparation, one_each, split_conversations, split_prompts
from octavo.python.sampling_params import SamplingParams
from tests.fakes.model_directories import text_ids, write_metaspace_model, write_tiny_model

READY = Ready("s", "fingerprint", 1024, 64, 16, 100, 8)
BOS = 1
CONVERSATION = [{"role": "system", "content": "say hello."}, {"role": "user", "content": "the quick fox"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    directory = write_tiny_model(tmp_path_factory.mktemp("tiny"), top_k=5, max_new_tokens=7)
    return read_model_files(Config(model=str(directory)))


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return read_model_files(Config(model=str(write_metaspace_model(tmp_path_factory.mktemp("bos")))))


@pytest.fixture
def preparation(tiny: ModelFiles) -> Preparation:
    return Preparation(tiny, READY, seed=0)


def test_chat_is_generate_of_the_templated_text_with_exactly_one_bos(with_bos: ModelFiles) -> None:
    preparation = Preparation(with_bos, READY, seed=0)
    chat = preparation.of_chat(CONVERSATION, SamplingParams())
    assert chat.prompt is not None
    assert chat.prompt.startswith("<s><|im_start|>system")
    assert chat.prompt_token_ids.count(BOS) == 1
    assert preparation.of_prompt(chat.prompt, SamplingParams()).prompt_token_ids == chat.prompt_token_ids
    assert preparation.of_prompt("the quick fox", SamplingParams()).prompt_token_ids.count(BOS) == 1


def test_a_chat_shows_what_users_wrote_and_keeps_it_text(preparation: Preparation) -> None:
    chat = preparation.of_chat([{"role": "user", "content": "<|im_end|>"}], SamplingParams())
    assert chat.prompt == "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert chat.prompt_token_ids.count(2) == 1


def test_tools_are_described_to_the_model(tiny: ModelFiles) -> None:
    preparation = Preparation(tiny, msgspec.structs.replace(READY, max_model_len=2048), seed=0)
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
    chat = preparation.of_chat([{"role": "user", "content": "hi"}], SamplingParams(), tools=tools)
    assert chat.prompt is not None
    assert '"name": "look_up"' in chat.prompt
    with pytest.raises(ValueError, match=r"tools\[0\].function is required"):
        preparation.of_chat([{"role": "user", "content": "hi"}], SamplingParams(), tools=[{"type": "function"}])


@pytest.mark.parametrize(
    ("prompts", "texts", "token_ids"),
    [
        ("ab", ["ab"], [text_ids("ab")]),
        (["ab", {"prompt": "c"}], ["ab", "c"], [text_ids("ab"), text_ids("c")]),
        ([5, 6], [None], [[5, 6]]),
        ([[5, 6], {"prompt_token_ids": (7,)}, "a"], [None, None, "a"], [[5, 6], [7], text_ids("a")]),
        ({"prompt_token_ids": [5]}, [None], [[5]]),
        (np.array([5, 6]), [None], [[5, 6]]),
        (np.array([[5, 6], [7, 8]]), [None, None], [[5, 6], [7, 8]]),
        ([np.array([5, 6]), "a"], [None, "a"], [[5, 6], text_ids("a")]),
        ([np.int64(5), 6], [None], [[5, 6]]),
        ({"prompt_token_ids": np.array([5])}, [None], [[5]]),
        ([], [], []),
    ],
)
def test_every_form_of_prompt(
    preparation: Preparation, prompts: object, texts: list[str | None], token_ids: list[list[int]]
) -> None:
    requests = [preparation.of_prompt(prompt, SamplingParams()) for prompt in split_prompts(prompts)]
    assert [request.prompt for request in requests] == texts
    assert [request.prompt_token_ids for request in requests] == token_ids


@pytest.mark.parametrize(
    ("prompt", "kind", "said"),
    [
        ("", ValueError, "the prompt is empty"),
        ("x" * 64, ValueError, "the prompt has 64 tokens, which leaves no room"),
        ([1024], ValueError, "token id 1024 is not in the vocabulary"),
        ([5, 0.5], TypeError, "a prompt is a string, a list of token ids, .*, not a list with float at index 1"),
        ([None], TypeError, "not a list with NoneType at index 0"),
        ([True, False], TypeError, "not a list with bool at index 0"),
        (np.array([True]), TypeError, "not a list with bool at index 0"),
        ({"prompt_token_ids": [np.array([5, 6])]}, TypeError, "a list of what is none"),
        (b"abc", TypeError, "not bytes"),
        (bytearray(b"abc"), TypeError, "not bytearray"),
        ([b"abc", "a"], TypeError, "not bytes"),
        (memoryview(b"abc"), TypeError, "not memoryview"),
        (None, TypeError, "a prompt is a string, .*, not NoneType"),
        ({"prompt": "a", "prompt_token_ids": [5]}, ValueError, "either 'prompt' or"),
        ({"prompt": [5]}, TypeError, "'prompt' is a string"),
        ({"multi_modal_data": {}}, ValueError, "'multi_modal_data' in a prompt is not supported"),
        ("\ud800", ValueError, "not valid Unicode"),
    ],
)
def test_a_prompt_that_cannot_be(preparation: Preparation, prompt: object, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        _ = [preparation.of_prompt(each, SamplingParams()) for each in split_prompts(prompt)]


@pytest.mark.parametrize(
    ("messages", "options", "said"),
    [
        ([{"role": "bot", "content": "a"}], {}, r"messages\[0\].role cannot be 'bot'"),
        ([{"role": "user"}], {}, r"messages\[0\].content is required"),
        ([], {}, "messages"),
        ([{"role": "system", "content": "refuse"}], {}, "no such system"),
        (CONVERSATION, {"chat_template_kwargs": {"x": 1}}, "does not take 'x'"),
        (CONVERSATION, {"continue_final_message": True}, "exclude each other"),
    ],
)
def test_a_conversation_that_cannot_be(
    preparation: Preparation, messages: list[dict[str, str]], options: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        preparation.of_chat(messages, SamplingParams(), **options)


def test_one_conversation_or_several() -> None:
    assert split_conversations(CONVERSATION) == [CONVERSATION]
    assert split_conversations([CONVERSATION, CONVERSATION]) == [CONVERSATION, CONVERSATION]
    with pytest.raises(TypeError, match="messages is a list"):
        split_conversations("hello")


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [({}, 7), ({"max_tokens": 9}, 9), ({"max_tokens": 1000}, 62), ({"max_tokens": None}, 62)],
)
def test_how_many_tokens_at_most(preparation: Preparation, fields: dict[str, int | None], max_tokens: int) -> None:
    [sequence] = preparation.of_prompt("ab", SamplingParams(**fields)).sequences
    assert sequence.sampling.max_tokens == max_tokens


def test_what_is_unset_is_the_models_and_what_is_set_wins(preparation: Preparation) -> None:
    assert preparation.of_prompt("a", SamplingParams()).sequences[0].sampling.top_k == 5
    assert preparation.of_prompt("a", SamplingParams(top_k=-1)).sequences[0].sampling.top_k == 0
    assert preparation.default_sampling_params() == SamplingParams(top_k=5, max_tokens=7)


def test_all_fields_reach_the_sequences(preparation: Preparation) -> None:
    params = SamplingParams(
        n=2,
        stop="x",
        stop_token_ids=[9],
        seed=-1,
        logprobs=3,
        prompt_logprobs=2,
        min_tokens=2,
        ignore_eos=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        logit_bias={5: -1.0},
    )
    first, second = preparation.of_prompt("a", params).sequences
    assert (first.stop, first.skip_special_tokens, first.include_stop_str_in_output) == (("x",), False, True)
    sampling = first.sampling
    assert (sampling.stop_token_ids, sampling.eos_token_ids, sampling.min_tokens) == ((9,), (), 2)
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs, sampling.logit_bias) == (3, 2, ((5, -1.0),))
    assert sampling.seed == 2**64 - 1
    assert second.sampling.seed != sampling.seed
    assert first.request_id != second.request_id


def test_a_seed_of_the_model_makes_drawn_seeds_repeatable(tiny: ModelFiles) -> None:
    def drawn() -> list[int]:
        preparation = Preparation(tiny, READY, seed=3)
        return [preparation.of_prompt("a", SamplingParams()).sequences[0].sampling.seed for _ in range(3)]

    assert drawn() == drawn()
    assert len(set(drawn())) == 3


def test_one_sampling_for_all_or_one_each() -> None:
    params = [SamplingParams(n=1), SamplingParams(n=2)]
    assert one_each(params, 2) == params
    assert one_each(None, 2) == [SamplingParams()] * 2
    with pytest.raises(ValueError, match="3 prompts and 2 sampling_params"):
        one_each(params, 3)
    with pytest.raises(TypeError, match="not dict"):
        one_each([{"n": 1}], 1)
    with pytest.raises(TypeError, match="one SamplingParams or one per prompt, not dict"):
        one_each({"n": 1}, 1)
    with pytest.raises(TypeError, match="one SamplingParams or one per prompt, not int"):
        one_each(3, 1)
