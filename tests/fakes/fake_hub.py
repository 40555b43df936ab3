"""A Hugging Face hub on loopback, as far as huggingface_hub needs one to download a model."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

COMMIT = "a" * 40


class FakeHub(ThreadingHTTPServer):
    """Serves `files` as the model `org/tiny`; `org/gated` is gated and nothing else exists."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.files = files
        self.announced_bytes: dict[str, int] = {}  # of files that it says are of another size than they are
        self.downloaded: list[str] = []
        self.held = ""  # a file that it begins to send, and no more
        self.holding = Event()
        self.tokens: set[str | None] = set()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    thread = Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Answer(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        self.server.tokens.add(self.headers["Authorization"])
        path = self.path.split("?")[0].removeprefix("/api/models")
        if path.startswith("/org/gated"):
            return self._send(403, b"restricted", {"X-Error-Code": "GatedRepo"})
        if path.startswith("/org/tiny/resolve/"):
            return self._send_file(path.split("/", 5)[5])
        if path == "/org/tiny" or path.startswith("/org/tiny/revision/"):
            sizes = {name: len(content) for name, content in self.server.files.items()} | self.server.announced_bytes
            siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
            return self._send_json({"id": "org/tiny", "sha": COMMIT, "siblings": siblings})
        if path.startswith("/org/tiny/tree/"):
            return self._send_json([self._entry(name) for name in self.server.files])
        return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})

    def _entry(self, name: str) -> dict[str, object]:
        content = self.server.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _send_file(self, name: str) -> None:
        content = self.server.files[name]
        if self.command == "GET":
            self.server.downloaded.append(name)
            if name == self.server.held:
                return self._hold()
        self._send(200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def _hold(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        self.server.holding.set()
        self.rfile.read(1)  # until the client is gone

    def _send_json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
