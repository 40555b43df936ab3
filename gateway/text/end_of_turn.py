"""Finds the control token with which a chat template ends an answer, by rendering a short chat."""

from collections.abc import Iterable
from threading import Thread

from octavo.gateway.text.chat_template import ChatTemplate

ANSWER = "answer"
CHAT = ({"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER})
PATIENCE_S = 30.0  # a template usually takes milliseconds; an endless one would block every request


def end_of_turn(template: ChatTemplate, control_tokens: Iterable[str], patience_s: float = PATIENCE_S) -> str | None:
    """Return the one of `control_tokens` that the template writes after an answer, or None if there is none.

    Raises ValueError if the template takes too long: a model's files are not trusted.
    """
    rendered: list[str] = []

    def render() -> None:
        try:
            rendered.append(template.render(CHAT, add_generation_prompt=False).text)
        except Exception:  # a request will get the error
            rendered.append("")

    # A thread that loops cannot be ended: the caller must end the process.
    thread = Thread(target=render, name="chat template", daemon=True)
    thread.start()
    thread.join(patience_s)
    if thread.is_alive():
        raise ValueError(f"the model's chat template is not done with two short messages after {patience_s:.0f} s")
    behind = "".join(rendered).rpartition(ANSWER)[2].lstrip()
    return max((token for token in control_tokens if behind.startswith(token)), key=len, default=None)
