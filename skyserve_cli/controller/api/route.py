"""A route of the API: the role that it needs, and its responses in place of errors."""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from provisioners.port.errors import ProvisionError
from skyserve_cli.clouds import CloudNotEnabledError
from skyserve_cli.config import ConfigError
from skyserve_cli.controller.api.access import AccessRole, authorize, calling
from skyserve_cli.controller.api.team_rules import TeamError
from skyserve_cli.controller.reconcile.store_health import sentence_of
from skyserve_cli.controller.rejected import RejectedError
from skyserve_cli.spec import SpecError
from skyserve_cli.state.lease import LeaseLostError
from skyserve_cli.state.transactions import Deadline, DeadlinePassedError, set_deadline
from skyserve_cli.state.values import (
    NoSuchServiceError,
    NotKeptError,
    ServiceExistsError,
    StillGoingDownError,
)

log = logging.getLogger(__name__)

_SHOWN = 5  # problems of a spec
MOST_DEADLINE_S = 86400.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Route(NamedTuple):
    """`{name}` in the path is a service, which the caller's token must cover.

    `for_proxy`: a file for users whom a proxy has authenticated, whichever role they have, on the port alone. `stores`: one
    transaction stores what is requested, so at the caller's deadline (header X-Deadline-S) it can be given up as a whole.
    """

    method: str
    path: str
    handler: Handler
    role: AccessRole = AccessRole.ADMIN
    for_proxy: bool = False
    stores: bool = False

    def definition(self) -> web.RouteDef:
        """Return the route for an application whose requests have a caller (`access.set_caller`)."""

        async def handle(request: web.Request) -> web.StreamResponse:
            if self.for_proxy and calling().by_proxy:
                return await self.handler(request)
            return await self._response(request)

        # A GET is a HEAD, too.
        return (
            web.get(self.path, handle) if self.method == "GET" else web.route(self.method, self.path, handle)
        )

    async def _response(self, request: web.Request) -> web.StreamResponse:
        """Return the handler's response, or one that says what was wrong."""
        try:
            authorize(calling(), self.role, request.match_info.get("name"))
            return await self._within_deadline(request)
        except web.HTTPException:
            raise
        except DeadlinePassedError:
            return refuse(504, "nothing was changed")
        except RejectedError as error:
            return refuse(error.status, str(error))
        except NoSuchServiceError as error:
            return refuse(404, f"there is no service {error}")
        except StillGoingDownError as error:
            return refuse(409, f"service {error} is still going down; try again when it is gone")
        except ServiceExistsError as error:
            return refuse(409, f"service {error} is up; use `serve update`, or `serve down` first")
        except LeaseLostError as error:
            return refuse(503, str(error))
        except SQLAlchemyError as error:
            return refuse(503, f"the controller cannot read or write its state: {sentence_of(error)}")
        except OSError as error:
            return refuse(
                507 if error.errno == errno.ENOSPC else 500,
                f"the controller's disk: {error.strerror or error}",
            )
        except (CloudNotEnabledError, TeamError, ConfigError) as error:
            return refuse(422, str(error))
        except NotKeptError as error:
            return refuse(
                500, f"{error}: the database would not give it back as it was sent; nothing was stored"
            )
        except ProvisionError as error:  # a cloud that refuses, or does not respond
            return refuse(503, error.message)
        except SpecError as error:
            return refuse(400, _one_sentence(error))
        except (KeyError, TypeError, ValueError) as error:
            return refuse(400, f"{type(error).__name__}: {error}")

    async def _within_deadline(self, request: web.Request) -> web.StreamResponse:
        """Return the handler's response. Raises DeadlinePassedError where the caller's deadline passes before it is stored."""
        sent = request.headers.get("X-Deadline-S", "") if self.stores or self.method == "GET" else ""
        limit = Deadline(min(MOST_DEADLINE_S, max(0.0, float(sent)))) if sent else None
        set_deadline(limit)
        if limit is None or not self.stores:  # what only reads begins no transaction after the deadline
            return await self.handler(request)
        task = asyncio.ensure_future(self.handler(request))
        await asyncio.wait({task}, timeout=limit.left_s())
        if not task.done() and limit.expire():
            task.add_done_callback(lambda one: one.cancelled() or one.exception())
            raise DeadlinePassedError
        return await task


@web.middleware
async def failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Respond with one sentence where nothing else did; the log has the rest, by the id in it."""
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except SQLAlchemyError as error:
        return refuse(503, f"the controller cannot read or write its state: {sentence_of(error)}")
    except Exception:
        failure = secrets.token_hex(4)
        log.exception("failure %s: %s %s", failure, request.method, request.path)
        return refuse(
            500, f"the controller failed at this request; see `serve logs --controller` for failure {failure}"
        )


def _one_sentence(error: SpecError) -> str:
    """Return the first problems. Keys of the spec are by their paths in it."""
    said = [str(problem).removeprefix("spec.") for problem in error.problems]
    more = [f"{len(said) - _SHOWN} more"] if len(said) > _SHOWN else []
    return "; ".join([*said[:_SHOWN], *more])


def refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
