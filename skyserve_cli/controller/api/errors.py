"""Responses to calls that the API rejects: a status and one sentence."""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from skyserve_cli.clouds import CloudNotEnabledError
from skyserve_cli.config import ConfigError
from skyserve_cli.controller.api.access import ForbiddenError, authorize, calling
from skyserve_cli.controller.api.endpoint_port import NoFreePortError
from skyserve_cli.controller.api.service import NoSuchReplicaError
from skyserve_cli.controller.api.team_rules import TeamError
from skyserve_cli.controller.persistence.leadership import NotLeadingError
from skyserve_cli.controller.reconcile.store_health import sentence_of
from skyserve_cli.controller.uploads.content_store import NoRoomForUploadError, NotUploadedError
from skyserve_cli.controller.uploads.manifest import ManifestError
from skyserve_cli.spec import SpecError
from skyserve_cli.state.lease import LeaseLostError
from skyserve_cli.state.team import NoSuchTokenError, TokenExistsError
from skyserve_cli.state.values import (
    NoSuchServiceError,
    NotKeptError,
    ServiceExistsError,
    StillGoingDownError,
)

log = logging.getLogger(__name__)

_SHOWN = 5  # problems of a spec

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def with_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return the handler's response, or one that says what was wrong. The caller must have the right to use the route."""
    try:
        route = request.match_info.route
        if route.resource is not None:
            path, name = route.resource.canonical, request.match_info.get("name")
            authorize(calling(), request.method, path, name)
        return await handler(request)
    except web.HTTPException:
        raise
    except ForbiddenError as error:
        return refuse(403, str(error))
    except TokenExistsError as error:
        return refuse(409, f"there is a token {error}; revoke it first, or choose another name")
    except NoSuchTokenError as error:
        return refuse(404, f"there is no token {error} that is in use")
    except NoSuchServiceError as error:
        return refuse(404, f"there is no service {error}")
    except NoSuchReplicaError as error:
        return refuse(404, str(error))
    except StillGoingDownError as error:
        return refuse(409, f"service {error} is still going down; try again when it is gone")
    except ServiceExistsError as error:
        return refuse(409, f"service {error} is up; use `serve update`, or `serve down` first")
    except NotLeadingError as error:
        return refuse(409, str(error))
    except LeaseLostError as error:
        return refuse(503, str(error))
    except SQLAlchemyError as error:
        return refuse(503, f"the controller cannot read or write its state: {sentence_of(error)}")
    except NotUploadedError as error:
        return refuse(409, str(error))
    except NoRoomForUploadError as error:
        return refuse(507, str(error))
    except ManifestError as error:
        return refuse(422, str(error))
    except OSError as error:
        return refuse(
            507 if error.errno == errno.ENOSPC else 500, f"the controller's disk: {error.strerror or error}"
        )
    except (CloudNotEnabledError, NoFreePortError, TeamError, ConfigError) as error:
        return refuse(422, str(error))
    except NotKeptError as error:
        return refuse(500, f"{error}: the database would not give it back as it was sent; nothing was stored")
    except SpecError as error:
        return refuse(400, _one_sentence(error))
    except (KeyError, TypeError, ValueError) as error:
        return refuse(400, f"{type(error).__name__}: {error}")


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


def with_json_errors(route: web.RouteDef) -> web.RouteDef:
    """Return the route with responses in place of errors."""

    async def handler(request: web.Request) -> web.StreamResponse:
        inner: Any = route.handler
        return await with_errors(request, inner)

    return web.RouteDef(route.method, route.path, handler, route.kwargs)


def refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
