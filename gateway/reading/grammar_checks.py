"""Other processes compile grammars (`grammar_checker.py`), so that one that explodes holds up nothing and can be ended.

The same grammars come again and again: what was found out about one is kept.
"""

import asyncio
import hashlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from octavo.gateway.request_error import RequestError, overloaded, unavailable
from octavo.gateway.text.grammar import Grammar
from octavo.protocol.config import PREFIX
from octavo.protocol.grammars import COMPILE_S, LENGTH_BYTES

NUM_CHECKERS = 2
MAX_CHECKS = 64  # at once, most of them waiting
MAX_TRIES = 3  # of one grammar: the machine may end a process
RETRY_AFTER_S = 1.0
NUM_KEPT = 1024  # verdicts
TOO_SLOW = f"it takes more than {COMPILE_S:g} s to compile: make it simpler"


class GrammarChecks:
    """Finds out whether grammars can be used. Several threads may use it at once. A process is started when needed."""

    def __init__(self, directory: Path) -> None:
        """`directory` is the model's."""
        self._free: queue.SimpleQueue[_Checker] = queue.SimpleQueue()
        self._checkers = [_Checker(directory) for _ in range(NUM_CHECKERS)]
        for checker in self._checkers:
            self._free.put(checker)
        self._reasons: OrderedDict[bytes, str] = OrderedDict()  # by the digest of a grammar; empty: it can be used
        self._lock = threading.Lock()
        self._num_checks = 0
        self._threads = ThreadPoolExecutor(MAX_CHECKS, thread_name_prefix="grammar-check")

    async def check_aside(self, grammar: Grammar) -> None:
        """Do `check` in another thread."""
        if self._kept(_digest(grammar)) == "":
            return
        await asyncio.get_running_loop().run_in_executor(self._threads, self.check, grammar)

    def check(self, grammar: Grammar) -> None:
        """Raise RequestError if a grammar cannot be used, takes too long, or too many are being checked (429)."""
        digest = _digest(grammar)
        reason = self._kept(digest)
        if reason is None:
            reason = self._found(grammar.text)
            with self._lock:
                self._reasons[digest] = reason
                if len(self._reasons) > NUM_KEPT:
                    self._reasons.popitem(last=False)
        if reason:
            message = f"{grammar.param} cannot be used: {reason}"
            raise RequestError(message, param=grammar.param, code="invalid_grammar")

    def close(self) -> None:
        """End the processes; checks that are under way fail."""
        for checker in self._checkers:
            checker.close()
        self._threads.shutdown()

    def _kept(self, digest: bytes) -> str | None:
        with self._lock:
            if digest in self._reasons:
                self._reasons.move_to_end(digest)
            return self._reasons.get(digest)

    def _found(self, text: str) -> str:
        with self._lock:
            if self._num_checks >= MAX_CHECKS:
                message = f"{self._num_checks} other grammars are being checked: send the request again later"
                raise overloaded(message, RETRY_AFTER_S)
            self._num_checks += 1
        checker = self._free.get()
        try:
            return checker.reason(text)
        finally:
            self._free.put(checker)
            with self._lock:
                self._num_checks -= 1


class _Checker:
    """One process, and the next one after it has ended. One thread at a time uses it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = self._is_closed = False

    def reason(self, text: str) -> str:
        """Return why a grammar cannot be used, or an empty string."""
        for _ in range(MAX_TRIES):
            process = self._process or self._start()
            try:
                if not self._is_ready and (refusal := _read(process)):
                    self._end()
                    return refusal
                self._is_ready = True
                return _ask(process, text)
            except (EOFError, BrokenPipeError, ValueError):  # ValueError: closed meanwhile
                is_slow = process.wait() == -signal.SIGPROF
                self._end()
                if is_slow:
                    with suppress(RequestError):
                        self._start()  # in time for the next grammar
                    return TOO_SLOW
        raise unavailable("the process that checks grammars ended")

    def close(self) -> None:
        """End the process for good; a check that is under way fails."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        process, self._process, self._is_ready = self._process, None, False
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(BrokenPipeError):
                    assert pipe is not None
                    pipe.close()

    def _start(self) -> "subprocess.Popen[bytes]":
        if self._is_closed:
            raise unavailable("the server is stopping")
        command = (sys.executable, "-P", "-m", "octavo.gateway.grammar_checker", str(self._directory))
        environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}  # no keys
        try:
            # A session of its own: a Ctrl-C is for the gateway alone. It ends when its standard input ends.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, start_new_session=True
            )
        except OSError as error:
            raise unavailable(f"the process that checks grammars cannot be started: {error.strerror}") from None
        return self._process


def _ask(process: "subprocess.Popen[bytes]", text: str) -> str:
    assert process.stdin is not None
    content = text.encode()
    process.stdin.write(len(content).to_bytes(LENGTH_BYTES, "big") + content)
    process.stdin.flush()
    return _read(process)


def _read(process: "subprocess.Popen[bytes]") -> str:
    """Return the next answer. Raises EOFError if the process has ended."""
    assert process.stdout is not None
    length = process.stdout.read(LENGTH_BYTES)
    content = process.stdout.read(int.from_bytes(length, "big")) if len(length) == LENGTH_BYTES else b""
    if len(length) < LENGTH_BYTES or len(content) < int.from_bytes(length, "big"):
        raise EOFError
    return content.decode()


def _digest(grammar: Grammar) -> bytes:
    return hashlib.blake2b(grammar.text.encode(), digest_size=16).digest()
