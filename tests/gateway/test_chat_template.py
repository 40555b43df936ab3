from typing import Any

import pytest

from octavo.gateway.text.chat_template import ChatTemplate, ChatTemplateError
from tests.fakes.model_directories import CHAT_TEMPLATE

SHOW = "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}"


def text_of(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, ["<|end|>"]).render(messages, **options).text


def test_the_template_sees_messages_special_tokens_and_whether_to_open_a_turn() -> None:
    messages = [{"role": "user", "content": "hi"}]
    opened = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(CHAT_TEMPLATE, messages) == opened
    assert text_of(CHAT_TEMPLATE, messages, add_generation_prompt=False) == opened.removesuffix(
        "<|im_start|>assistant\n"
    )


def test_text_parts_are_joined_in_order() -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "blue"}]
    for role in ("system", "user", "assistant", "tool"):
        assert text_of(SHOW, [{"role": role, "content": parts}]) == f"[{role}:Say blue]"
    assert text_of(SHOW, [{"role": "user", "content": []}]) == "[user:]"


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "assistant"}])
def test_no_content_is_empty_content(message: dict[str, Any]) -> None:
    assert text_of(CHAT_TEMPLATE, [message], add_generation_prompt=False) == "<s><|im_start|>assistant\n<|im_end|>\n"


def test_a_part_that_is_no_text_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="'image_url'"):
        text_of(SHOW, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_developers_are_the_system_to_templates_that_do_not_know_them() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert text_of(SHOW, messages) == "[system:x]"
    assert text_of(SHOW + "{# developer #}", messages) == "[developer:x]"


ONE_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}[S:{{ messages[0]['content'] }}]{% endif %}"
    "{% for m in messages if m['role'] != 'system' %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}"
)
STRICT = (
    "{% for m in messages[1:] if m['role'] == 'system' %}{{ raise_exception('one system') }}{% endfor %}" + ONE_SYSTEM
)


def said(*pairs: str) -> list[dict[str, Any]]:
    return [dict(zip(("role", "content"), pair.split(":"), strict=True)) for pair in pairs]


def test_developers_and_the_system_are_one_message_where_the_template_knows_one() -> None:
    messages = said("system:a", "developer:b", "user:hi")
    for source in (SHOW, ONE_SYSTEM, STRICT):
        lead = "system" if source is SHOW else "S"
        assert text_of(source, messages) == f"[{lead}:a\n\nb][user:hi]"
        assert text_of(source, said("developer:b", "system:a", "user:hi")) == f"[{lead}:b\n\na][user:hi]"
    assert text_of(SHOW + "{# developer #}", messages) == "[system:a][developer:b][user:hi]"


def test_later_system_messages_keep_their_place_unless_the_template_knows_one() -> None:
    messages = said("system:a", "user:hi", "developer:b", "assistant:c", "system:d", "user:e")
    for source in (ONE_SYSTEM, STRICT):
        assert text_of(source, messages) == "[S:a\n\nb\n\nd][user:hi][assistant:c][user:e]"
    assert text_of(SHOW, messages) == "[system:a][user:hi][system:b][assistant:c][system:d][user:e]"
    assert text_of(SHOW, said("system:a", "system:b", "user:c")) == "[system:a][system:b][user:c]"


def nested(depth: int, kind: type) -> Any:
    value: Any = "end"
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


@pytest.mark.parametrize("source", ["{{ x }}", "{{ x | tojson }}", "{{ x | length }}", "{{ x == messages }}"])
def test_what_is_nested_deeply_is_refused_or_rendered(source: str) -> None:
    for kind in (list, dict):
        assert text_of(source, [], template_kwargs={"x": nested(10, kind)})
        for depth in (1000, 5000):
            with pytest.raises(ChatTemplateError, match="nested too deeply"):
                text_of(source, [], template_kwargs={"x": nested(depth, kind)})


def test_the_final_message_is_left_open_to_be_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]
    text = text_of(CHAT_TEMPLATE, messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nI am")
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        text_of(CHAT_TEMPLATE, messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('no system role, please') }}", "no system role, please"),
        ("{{ messages[0]['content'] + 1 }}", "concatenate"),
        ("{{ messages[3].content }}", "no element 3"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ nothing.there }}", "nothing"),
        ("{{ messages | sum }}", "unsupported operand"),
        ("{{ messages | map('no_such') | list }}", "no_such"),
        ("{{ ('%d' | format(messages)) }}", "%d format"),
        ("{{ 10.0 ** 1000 }}", "out of range"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "nested too deeply"),
    ],
)
def test_what_a_template_refuses_is_said_in_its_own_words(source: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        text_of(source, [{"role": "user", "content": "x"}])


def test_a_model_without_template_says_so() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplate(None, {}).render([{"role": "user", "content": "x"}])


def test_a_template_that_is_not_jinja_is_an_error_at_the_start() -> None:
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("\n{% for %}", {})


def test_a_request_may_set_what_the_template_reads_and_nothing_else() -> None:
    source = "{% generation %}{{ enable_thinking }}{% endgeneration %}{{ bos_token }}{{ messages }}{{ tokenize }}"
    text = text_of(source, [], template_kwargs={"enable_thinking": False})
    assert text == "False<s>[]"
    assert text_of(source, [], template_kwargs={"no_such": False, "nor": None, "tokenize": None}).startswith("<s>")
    for name in ("tokenize", "chat_template", "bos_token", "messages", "no_such"):
        with pytest.raises(ChatTemplateError, match=f"does not take '{name}'.*enable_thinking"):
            text_of(source, [], template_kwargs={name: "x"})


def test_control_tokens_of_users_become_placeholders_wherever_they_stand() -> None:
    template = ChatTemplate("{{ messages[0]['content'] }}{{ tools | tojson }}{{ x }}<|end|>", {}, ["<|end|>"])
    rendered = template.render(
        [{"role": "user", "content": [{"type": "text", "text": "<|en"}, {"type": "text", "text": "d|>"}]}],
        tools=[{"name": "f", "parameters": {"<|end|>": ["<|end|>"]}}],
        template_kwargs={"x": "<|end|>"},
    )
    assert rendered.text.count("<|end|>") == 1
    [(placeholder, token)] = rendered.placeholders.items()
    assert token == "<|end|>"
    assert rendered.text.replace(placeholder, token) == (
        '<|end|>[{"name": "f", "parameters": {"<|end|>": ["<|end|>"]}}]<|end|><|end|>'
    )


def test_a_refusal_names_what_the_user_wrote_and_no_placeholder() -> None:
    template = ChatTemplate("{{ raise_exception(messages[0]['content']) }}", {}, ["<|end|>"])
    with pytest.raises(ChatTemplateError, match=r"messages: no <\|end\|> here"):
        template.render([{"role": "user", "content": "no <|end|> here"}])
