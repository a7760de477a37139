"""What the API returns when it cannot do what was requested, in OpenAI's error shape.

ApiError
├─ BadRequest      400   the client must change the request
├─ ModelNotFound   404   another engine serves that model
└─ EngineDown      503   try another replica
"""

from __future__ import annotations

from typing import Any, ClassVar


class ApiError(Exception):
    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        return error_body(self.message, self.kind, self.param, self.code)


class BadRequest(ApiError):
    status = 400
    kind = "invalid_request_error"


class ModelNotFound(ApiError):
    status = 404
    kind = "invalid_request_error"

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(
            f"The model {asked!r} does not exist: this engine serves {served!r}",
            param="model",
            code="model_not_found",
        )


class EngineDown(ApiError):
    status = 503
    kind = "service_unavailable"


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of every error this server sends."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
