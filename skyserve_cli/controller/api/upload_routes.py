"""Local files of people on other hosts, which operators may send for the services that they may change.

POST /v1/uploads?service=NAME         {"manifest": [entries]} -> {"reference", "missing": [digests]}
POST /v1/uploads/parts?service=NAME   a line of JSON [[digest, size], ...], then the bytes -> {"stored": count}

A manifest without missing parts is complete. A part is accepted after a manifest has announced it, so what can be stored is
bounded by the manifests, each request by the API's limit of a body, and all together by `ContentStore`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from skyserve_cli.controller.api.access import ForbiddenError, calling, insist_on
from skyserve_cli.controller.uploads.content_store import ContentStore, decode_parts
from skyserve_cli.controller.uploads.manifest import ManifestError, manifest_from, references_of

_AT_ONCE = 2


class UploadRoutes:
    """Routes over a store. `refuse_unless_leading` raises NotLeadingError: replicas are launched by the leader."""

    def __init__(self, store: ContentStore, refuse_unless_leading: Callable[[], None]) -> None:
        self._store = store
        self._refuse_unless_leading = refuse_unless_leading
        #: A large tree takes a while to make; the threads that serve other requests must not all wait for it.
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/uploads", self._announce),
            web.post("/v1/uploads/parts", self._add),
        ]

    async def insist_on(self, spec: Mapping[str, Any]) -> None:
        """Raise NotUploadedError unless the uploaded files that a spec names are complete, ManifestError."""
        references = references_of(spec)
        if references:
            await asyncio.to_thread(self._store.insist_on, references)

    async def _announce(self, request: web.Request) -> web.Response:
        self._insist(request)
        body = await request.json()
        if not isinstance(body, dict):
            raise ManifestError("the body must be a JSON object")
        # A manifest has up to some megabytes, so it is read on a thread, too.
        async with self._turns:
            manifest = await asyncio.to_thread(manifest_from, body.get("manifest"))
            missing = await asyncio.to_thread(self._store.announce, manifest)
        return web.json_response({"reference": manifest.reference, "missing": missing})

    async def _add(self, request: web.Request) -> web.Response:
        self._insist(request)
        body = await request.read()
        async with self._turns:
            stored = await asyncio.to_thread(lambda: self._store.add(decode_parts(body)))
        return web.json_response({"stored": stored})

    def _insist(self, request: web.Request) -> None:
        service = request.query.get("service", "")
        if not service and calling().services is not None:
            raise ForbiddenError("an upload must name its service")
        insist_on(calling(), [service] if service else [])
        self._refuse_unless_leading()
