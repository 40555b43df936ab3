"""The one error of a request: its status, and what a dialect says about it. No HTTP library is needed to raise it."""


class RequestError(Exception):
    """A request that is answered with an error: the status, and what the envelope says.

    `param` is the path of the field that is wrong ("messages[0].content"), `code` a word for programs.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code, self.headers = message, param, status, code, headers


def unsupported(param: str, what: str | None = None) -> RequestError:
    """Return the error for a field, or a value of it, that is known but not implemented."""
    return RequestError(f"{what or param} is not supported", param=param, code="unsupported_parameter")


def overloaded(reason: str, retry_after_s: float) -> RequestError:
    """Return the 429 that asks the client to come back after `retry_after_s`."""
    headers = {"Retry-After": str(max(1, round(retry_after_s)))}
    return RequestError(reason, status=429, code="overloaded", headers=headers)


def unavailable(reason: str) -> RequestError:
    return RequestError(reason, status=503, code="service_unavailable", headers={"Retry-After": "1"})
