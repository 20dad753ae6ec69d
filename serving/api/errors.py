"""Errors as HTTP: OpenAI's error body, and the only place that knows status codes."""

import math
from collections.abc import Mapping
from typing import assert_never

from pydantic import ValidationError
from starlette.responses import JSONResponse

from scheduler.messages import ErrorKind
from serving.generation_request import InvalidRequestError, RequestFailedError

RETRY_AFTER_S = 1.0
"""Told to clients that were refused for want of room or of a worker."""


class ApiError(Exception):
    """An answer other than success.

    Attributes:
        status: the HTTP code.
        param: the parameter at fault, where there is one.
        code: a machine-readable reason.
        headers: to be added to the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Args: see the class."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        error = {"message": str(self), "type": _type_of(self.status), "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The whole HTTP answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def of_invalid(error: InvalidRequestError) -> ApiError:
    """The client's mistake."""
    return ApiError(400, str(error), param=error.param, code=error.code)


def of_failure(error: RequestFailedError) -> ApiError:
    """A request that the cluster refused or lost."""
    status = _status_of(error.kind)
    headers = {"Retry-After": str(math.ceil(RETRY_AFTER_S))} if status in (429, 503) else {}
    return ApiError(status, str(error), code=error.kind.value, headers=headers)


def of_validation(error: ValidationError) -> ApiError:
    """The first thing that a schema found wrong, with the path to it as `param`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _path(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}" if param else message, param=param or None)


def internal_error() -> ApiError:
    """A bug of ours; the log has the details, the client does not."""
    return ApiError(500, "The server had an error while processing your request.", code="internal")


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _status_of(kind: ErrorKind) -> int:
    match kind:
        case ErrorKind.INVALID | ErrorKind.NEVER_FITS:
            return 400
        case ErrorKind.QUEUE_FULL:
            return 429
        case ErrorKind.NO_WORKER | ErrorKind.WORKER_LOST:
            return 503
        case ErrorKind.DEADLINE:
            return 504
        case ErrorKind.ENGINE | ErrorKind.TRANSFER | ErrorKind.INTERNAL:
            return 500
    assert_never(kind)
