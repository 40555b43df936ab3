"""The control token with which a chat template ends an answer, found by rendering one."""

from collections.abc import Iterable
from threading import Thread

from octavo.gateway.text.chat_template import ChatTemplate

ANSWER = "answer"
CHAT = ({"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER})
PATIENCE_S = 30.0  # a template takes milliseconds; one that loops would hold up every request


def end_of_turn(template: ChatTemplate, control_tokens: Iterable[str], patience_s: float = PATIENCE_S) -> str | None:
    """Return the one of `control_tokens` that the template puts behind an answer, None if it puts none there.

    Raises ValueError if the template is not done in time: it may be a stranger's.
    """
    rendered: list[str] = []

    def render() -> None:
        try:
            rendered.append(template.render(CHAT, add_generation_prompt=False).text)
        except Exception:  # a request is told what is wrong
            rendered.append("")

    # A thread that loops cannot be ended: whoever called is to end the process.
    thread = Thread(target=render, name="chat template", daemon=True)
    thread.start()
    thread.join(patience_s)
    if thread.is_alive():
        raise ValueError(f"the model's chat template is not done with two short messages after {patience_s:.0f} s")
    behind = "".join(rendered).rpartition(ANSWER)[2].lstrip()
    return max((token for token in control_tokens if behind.startswith(token)), key=len, default=None)
