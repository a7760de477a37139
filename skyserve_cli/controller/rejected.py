"""Why the API rejects a call, of the kernel and of parts."""

from __future__ import annotations


class RejectedError(Exception):
    """The call is rejected with this HTTP status; the text gives the reason. A subclass sets `status`."""

    status = 422

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = self.status if status is None else status
