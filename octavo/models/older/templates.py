"""How the older models' own code writes a chat, as Jinja. Block tags swallow the newline after them, so no newline
follows a tag here."""

from string import Template

_OTHER_ROLE = "{{ raise_exception('this model knows no role ' ~ message['role'] ~ ' here') }}"

# ChatML, with the system prompt of Qwen's `chat()`.
QWEN = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Rounds counted from 1. A system message, which ChatGLM2 was not trained with, stands before them.
CHATGLM2 = (
    "[gMASK]<sop>{% set rounds = namespace(count=0) %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set rounds.count = rounds.count + 1 %}"
    "{{ '[Round ' ~ rounds.count ~ ']\\n\\n问：' ~ message['content'] ~ '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '答：' ~ message['content'] ~ '\\n\\n' }}"
    "{% elif message['role'] == 'system' and loop.first %}{{ message['content'] ~ '\\n\\n' }}"
    "{% else %}" + _OTHER_ROLE + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '答：' }}{% endif %}"
)

_GLM_ROLES = Template(
    "[gMASK]<sop>{% for message in messages %}"
    "{% set role = 'observation' if message['role'] == 'tool' else message['role'] %}"
    "{% if role not in ['system', 'user', 'assistant', 'observation'] %}" + _OTHER_ROLE + "{% endif %}"
    "{{ '<|' ~ role ~ '|>\\n$space' ~ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# ChatGLM3 encodes the line of the role and the message one by one: each begins with SentencePiece's space.
CHATGLM3 = _GLM_ROLES.substitute(space=" ")
GLM4 = _GLM_ROLES.substitute(space="")

_BAICHUAN = Template(
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '$user' }}"
    "{% elif message['role'] == 'assistant' %}{{ '$assistant' }}"
    "{% elif message['role'] != 'system' or not loop.first %}" + _OTHER_ROLE + "{% endif %}"
    "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}{{ '$assistant' }}{% endif %}"
)


def baichuan(user: str, assistant: str) -> str:
    """Return the template of a Baichuan whose messages begin with these tokens."""
    return _BAICHUAN.substitute(user=user, assistant=assistant)
