"""Local files of people on other hosts, which operators may send for the services that they may change.

POST /v1/uploads?service=NAME         {"manifest": [entries]} -> {"reference", "missing": [digests]}
POST /v1/uploads/parts?service=NAME   a line of JSON [[digest, size], ...], then the bytes -> {"stored": count}

A manifest without missing parts is complete. A part is accepted after a manifest has announced it, so what can be stored is
bounded by the manifests, each request by the API's limit of a body, and all together by `ContentStore`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from skyserve_cli.controller.api.access import AccessRole, ForbiddenError, calling, insist_on
from skyserve_cli.controller.api.route import Route
from skyserve_cli.controller.part import Kernel, Part
from skyserve_cli.controller.references import ManifestError, references_of
from skyserve_cli.controller.uploads.content_store import ContentStore, decode_parts
from skyserve_cli.controller.uploads.manifest import manifest_from
from skyserve_cli.state.store import Store

_AT_ONCE = 2
#: For what is uploaded and is of no version yet, or of none any more.
KEEP_UPLOADS_S = 86400.0


class UploadsPart(Part):
    """Receives files, admits no spec whose files are missing, and removes those that no version names any more."""

    name = "uploads"

    def __init__(self, kernel: Kernel) -> None:
        self._store = kernel.store
        self._uploads = ContentStore(kernel.home.uploads)
        # Replicas are launched by the leader, so files are sent to it.
        self._refuse_unless_leading = kernel.service.refuse_unless_leading
        #: A large tree takes a while to make; the threads that serve other requests must not all wait for it.
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def routes(self) -> Sequence[Route]:
        return [
            Route("POST", "/v1/uploads", self._announce, AccessRole.OPERATOR),
            Route("POST", "/v1/uploads/parts", self._add, AccessRole.OPERATOR),
        ]

    def admit(self, spec: Mapping[str, Any]) -> None:
        """Raise NotUploadedError unless the uploaded files that a spec names are complete, ManifestError."""
        self._uploads.insist_on(references_of(spec))

    def tidy(self, now: float) -> None:
        remove_unused(self._store, self._uploads, now)

    async def _announce(self, request: web.Request) -> web.Response:
        self._insist(request)
        body = await request.json()
        if not isinstance(body, dict):
            raise ManifestError("the body must be a JSON object")
        # A manifest has up to some megabytes, so it is read on a thread, too.
        async with self._turns:
            manifest = await asyncio.to_thread(manifest_from, body.get("manifest"))
            missing = await asyncio.to_thread(self._uploads.announce, manifest)
        return web.json_response({"reference": manifest.reference, "missing": missing})

    async def _add(self, request: web.Request) -> web.Response:
        self._insist(request)
        body = await request.read()
        async with self._turns:
            stored = await asyncio.to_thread(lambda: self._uploads.add(decode_parts(body)))
        return web.json_response({"stored": stored})

    def _insist(self, request: web.Request) -> None:
        service = request.query.get("service", "")
        if not service and calling().services is not None:
            raise ForbiddenError("an upload must name its service")
        insist_on(calling(), [service] if service else [])
        self._refuse_unless_leading()


def remove_unused(store: Store, uploads: ContentStore, now: float) -> None:
    """Remove what no stored spec names, and is older than KEEP_UPLOADS_S."""
    # Read first: what is uploaded meanwhile is younger than that.
    used = store.specs_of_versions()
    ids = {reference.id for spec in used for reference in references_of(spec)}
    uploads.prune(ids, before=now - KEEP_UPLOADS_S)
