"""`python -m octavo.gateway.reader`: turns long bodies into tokens for a gateway, whose event loop stays free.

Decoding JSON, rendering a template and searching a text hold the interpreter until they return. Orders come through
standard input, and replies go to standard output. Bodies take turns, one step each, so that short ones end first. A
step that takes too long ends the process; the gateway starts another process.
"""

import faulthandler
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from octavo.gateway.asking.model import ServedModel, formats_from
from octavo.gateway.http.body import decode_body
from octavo.gateway.http.door import Door
from octavo.gateway.http.embeddings import EMBEDDINGS
from octavo.gateway.http.errors import internal_error
from octavo.gateway.http.generate import CHAT, COMPLETIONS
from octavo.gateway.http.messages import COUNT_TOKENS, MESSAGES
from octavo.gateway.http.responses import RESPONSES
from octavo.gateway.http.service import served_name
from octavo.gateway.http.tokenization import DETOKENIZE, TOKENIZE
from octavo.gateway.parsing.formats import Formats
from octavo.gateway.reading.messages import Cancel, Done, Order, Piece, Read, Reply, Tokens, Wrong, framed, read_order
from octavo.gateway.request_error import RequestError
from octavo.gateway.text.model_files import ModelFiles, read_model_files
from octavo.gateway.text.steps import Steps, next_step
from octavo.protocol.messages import pack_ids
from octavo.protocol.process import configure_logging, refuse
from octavo.protocol.settings.loading import load_config

ALL_DOORS = (CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, COUNT_TOKENS, RESPONSES, TOKENIZE, DETOKENIZE)
DOORS: dict[str, Door[Any, Any]] = {door.name: door for door in ALL_DOORS}
STEP_S = 5.0  # the most processor time of a step; usual texts take milliseconds
UNWANTED_S = 0.5  # the same, for a client that left
LOOK_S = 0.1

Start = Callable[[Read, bytes], Steps[list[Reply]]]

logger = logging.getLogger(__name__)


class Jobs:
    """The bodies that are being read. `turn`, `take` and `end_if_slow` are called by three different threads."""

    def __init__(
        self,
        start: Start,
        answer: Callable[[Reply], None],
        step_s: float = STEP_S,
        unwanted_s: float = UNWANTED_S,
    ) -> None:
        self._start, self._answer = start, answer
        self._step_s, self._unwanted_s = step_s, unwanted_s
        self._pieces: dict[int, list[bytes]] = {}  # by job, for bodies that have not arrived completely
        self._wanted: set[int] = set()
        self._ordered: queue.SimpleQueue[tuple[Read, bytes]] = queue.SimpleQueue()
        self._waiting: deque[tuple[int, Steps[list[Reply]]]] = deque()
        self._present: tuple[int, float] | None = None  # the job of the present step, and when the step began
        self._is_ending = threading.Lock()

    def take(self, order: Order) -> None:
        match order:
            case Piece(job_id, content):
                self._pieces.setdefault(job_id, []).append(content)
            case Read(job_id):
                self._wanted.add(job_id)
                self._ordered.put((order, b"".join(self._pieces.pop(job_id))))
            case Cancel(job_id):
                self._pieces.pop(job_id, None)
                self._wanted.discard(job_id)

    def turn(self) -> None:
        """Do a step of the body that has waited longest. Wait for a body if there is none."""
        while not self._waiting or not self._ordered.empty():
            read, content = self._ordered.get()
            self._waiting.append((read.job_id, self._start(read, content)))
        job_id, steps = self._waiting.popleft()
        if job_id not in self._wanted:
            return
        self._present = job_id, time.process_time()
        answers = _answers(job_id, steps)
        with self._is_ending:
            self._present = None
        if answers is None:
            self._waiting.append((job_id, steps))
            return
        self._wanted.discard(job_id)
        for answer in answers:
            self._answer(answer)

    def end_if_slow(self, end: Callable[[], None]) -> None:
        """If the present step takes too long, reply that its body failed and call `end`, which must end the process."""
        with self._is_ending:
            if self._present is None:
                return
            job_id, begun_s = self._present
            limit_s = self._step_s if job_id in self._wanted else self._unwanted_s
            if time.process_time() - begun_s > limit_s:
                self._answer(_too_slow(job_id, limit_s))
                end()


def _too_slow(job_id: int, limit_s: float) -> Wrong:
    reason = (
        f"this prompt keeps the model's tokenizer busy for more than {limit_s:g} s in one piece: send a shorter one"
    )
    return Wrong(job_id, reason, None, 400, "prompt_too_slow")


def _answers(job_id: int, steps: Steps[list[Reply]]) -> list[Reply] | None:
    """Do the next step. Return the replies, or None if there are more steps."""
    try:
        result = next_step(steps)
    except RequestError as error:
        wrong = error
    except Exception:
        logger.exception("a body could not be read")
        wrong = internal_error()
    else:
        return None if result is None else result[0]
    return [Wrong(job_id, wrong.message, wrong.param, wrong.status, wrong.code)]


def reading(files: ModelFiles, formats: Formats) -> Start:
    """Return a function that starts to read a body for the model of `files`."""

    def start(read: Read, content: bytes) -> Steps[list[Reply]]:
        door = DOORS[read.door]
        body = decode_body(door.decoder, content)
        del content
        asked = door.ask(body)
        served_name(body.model, read.model_names)
        yield
        model = ServedModel(files, read.ready, lambda: 0, formats)  # the gateway draws the seed
        prepared = yield from door.prepare(asked, model)
        body.forget_prompt()
        body.forget_advice()
        prompts = [Tokens(read.job_id, pack_ids(each.token_ids), each.text) for each in prepared]
        return [*prompts, Done(read.job_id, msgspec.json.encode(body))]

    return start


def _listen(orders: BinaryIO, jobs: Jobs) -> None:
    """Take orders until the gateway has ended; then end this process."""
    while order := read_order(orders):
        jobs.take(order)
    os._exit(0)


def _watch(jobs: Jobs) -> None:
    while True:
        time.sleep(LOOK_S)
        jobs.end_if_slow(lambda: os._exit(1))


def main() -> int:
    """Serve until the gateway ends. Return an exit status only for a model that cannot be used."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a library that prints must not write between the replies
    faulthandler.register(signal.SIGQUIT)
    try:
        config = load_config(os.environ)
        configure_logging("reader", "error")  # the gateway has logged the warnings about the model
        files = read_model_files(config)
        formats = formats_from(config, files.chat_template)
    except (ValueError, OSError) as error:
        return refuse("octavo.gateway.reader", error)

    def answer(message: Reply) -> None:
        content = memoryview(framed(message))
        while content:
            content = content[answers.write(content) :]

    jobs = Jobs(reading(files, formats), answer)
    threading.Thread(target=_listen, args=(sys.stdin.buffer, jobs), daemon=True).start()
    threading.Thread(target=_watch, args=(jobs,), daemon=True).start()
    while True:
        jobs.turn()


if __name__ == "__main__":
    sys.exit(main())
