"""Requests that cannot be answered, as HTTP and OpenAI's error object say it.

    RequestError (StrataFluxError)    status, parameter and code; the four parts make its message

Any other error of the package becomes one at a single boundary, :func:`as_request_error`.
"""

from strataflux.client.errors import MisuseError, StrataFluxError

__all__ = ["RequestError", "as_request_error"]

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(StrataFluxError):
    """A request that is refused, or that failed.

    Attributes:
        status: of the HTTP answer.
        parameter: the field of the request it is about, if it is about one.
        code: a word for programs, such as ``context_length_exceeded``.
    """

    def __init__(
        self,
        subject: object,
        found: str,
        expected: str,
        remedy: str,
        *,
        status: int = 400,
        parameter: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(subject, found, expected, remedy)
        self.status = status
        self.parameter = parameter
        self.code = code

    def to_json(self) -> dict[str, object]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}}


def as_request_error(error: Exception) -> RequestError:
    """What to answer for ``error``: misuse is the client's, all else the server's."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, StrataFluxError):
        status = 400 if isinstance(error, MisuseError) else 503
        return RequestError(error.subject, error.found, error.expected, error.remedy, status=status)
    found = f"{type(error).__name__}: {error}"
    return RequestError("server", found, "an answer", "see the server's log", status=500, code="internal_error")
