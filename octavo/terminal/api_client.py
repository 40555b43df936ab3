"""A client of OpenAI's API for the terminal: lists models, and streams answers."""

import ipaddress
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import msgspec

from octavo.errors import CommandError
from octavo.terminal.event_stream import event_payloads

CONNECT_TIMEOUT_S = 10.0
DONE = b"[DONE]"
MAX_SHOWN_CHARACTERS = 300  # of an answer that is not an error of OpenAI's API


class DeltaShape(msgspec.Struct):
    content: str | None = None


class ChoiceShape(msgspec.Struct):
    delta: DeltaShape | None = None
    text: str | None = None
    finish_reason: str | None = None


class UsageShape(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class ChunkShape(msgspec.Struct):
    """The fields of a chunk that the terminal reads."""

    choices: list[ChoiceShape] | None = None
    usage: UsageShape | None = None


class ApiError(CommandError):
    """The server refused a request or failed. The message is one sentence for the person who waits for an answer."""


class ApiClient:
    """Sends requests to the server at `url`, such as http://127.0.0.1:8000/v1, with a key if there is one."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        try:
            self._http = httpx.Client(
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                # A request may wait in a queue for any time; Ctrl-C ends the wait.
                timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
                trust_env=not _is_loopback(self.url),  # a proxy does not know our loopback
            )
        except (httpx.InvalidURL, ValueError, UnicodeError) as error:
            raise ApiError(f"{url} cannot be asked: {error}") from None

    def close(self) -> None:
        self._http.close()

    def model_names(self) -> list[str]:
        """Return the names of the server's models. Raises ApiError."""
        with self._errors():
            response = self._http.get(f"{self.url}/models")
            self._check(response)
            try:
                return [str(model["id"]) for model in response.json()["data"]]
            except (ValueError, KeyError, TypeError):
                raise ApiError(f"what answers at {self.url}/models is no list of models") from None

    def stream(self, route: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the chunks of the answer to `body`, as they come; closing ends the generation. Raises ApiError."""
        try:
            content = msgspec.json.encode({**body, "stream": True})
        except UnicodeEncodeError:
            raise ApiError("what was typed is not UTF-8") from None
        headers = {"Content-Type": "application/json"}
        with (
            self._errors(),
            self._http.stream("POST", f"{self.url}/{route}", content=content, headers=headers) as response,
        ):
            if response.is_error:
                response.read()
            self._check(response)
            with suppress(httpx.RemoteProtocolError, httpx.ReadError):
                for payload in event_payloads(response.iter_bytes()):
                    if payload == DONE:
                        return
                    yield _chunk(payload)
        raise ApiError("the server ended the connection in the middle of its answer")

    def _check(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        message = _message(response)
        match response.status_code:
            case 401:
                message += ". Give one with --api-key or OCTAVO_API_KEY"
            case 404 if not self.url.endswith("/v1"):
                message += f" ({self.url} does not end in /v1, as most such addresses do)"
        raise ApiError(f"{message} (status {response.status_code})")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn the errors of the connection into an ApiError."""
        try:
            yield
        except httpx.ConnectError as error:
            raise ApiError(
                f"no server answers at {self.url} ({_cause(error)}): start one with `octavo serve`, name another with"
                " --url, or name a MODEL to start for this alone"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ApiError(f"{self.url} cannot be asked: {error or type(error).__name__}") from None


def _cause(error: httpx.ConnectError) -> str:
    return re.sub(r"^\[.*?\] ", "", str(error))


def _is_loopback(url: str) -> bool:
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _chunk(payload: bytes) -> dict[str, Any]:
    try:
        chunk: dict[str, Any] = msgspec.json.decode(payload, type=dict[str, Any])
        if chunk.get("error") is not None:
            raise ApiError(_error_message(chunk["error"]))
        msgspec.convert(chunk, ChunkShape)
    except msgspec.DecodeError:
        raise ApiError(f"the server sent what is no chunk of an answer: {payload[:MAX_SHOWN_CHARACTERS]!r}") from None
    return chunk


def _message(response: httpx.Response) -> str:
    """Return the message of an error, in the forms of several servers."""
    try:
        body = response.json()
    except ValueError:
        return f"the server answered {response.text.strip()[:MAX_SHOWN_CHARACTERS] or response.reason_phrase}"
    return _error_message(body.get("error", body) if isinstance(body, dict) else body)


def _error_message(error: Any) -> str:
    said = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
    return str(said)[: 4 * MAX_SHOWN_CHARACTERS].rstrip(".")
