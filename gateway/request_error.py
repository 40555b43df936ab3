"""The error of a request, which each dialect renders. Raising it needs no HTTP library."""


class RequestError(Exception):
    """A request is answered with an error. `param` is the path of the wrong field ("messages[0].content"); `code` is a
    word for programs.
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
    """Return the error for a known field, or a value of it, that is not implemented."""
    return RequestError(f"{what or param} is not supported", param=param, code="unsupported_parameter")


def overloaded(reason: str, retry_after_s: float) -> RequestError:
    """Return the error (429) that asks the client to try again after `retry_after_s`."""
    headers = {"Retry-After": str(max(1, round(retry_after_s)))}
    return RequestError(reason, status=429, code="overloaded", headers=headers)


def unavailable(reason: str) -> RequestError:
    return RequestError(reason, status=503, code="service_unavailable", headers={"Retry-After": "1"})
