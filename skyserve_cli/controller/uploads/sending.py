"""How a command sends the local files of a spec to a controller on another host."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from skyserve_cli.controller.references import ManifestError
from skyserve_cli.controller.uploads.content_store import encode_parts
from skyserve_cli.controller.uploads.folder import Known, manifest_of, part_of
from skyserve_cli.controller.uploads.manifest import FILE, PART_BYTES, Manifest

#: The name of every work directory: where it is on a person's machine is no part of a version.
WORKDIR = "workdir"
_MOST_PARTS = 2000  # of one request
_ROUNDS = 5

#: Called with the manifest's JSON; returns the digests of missing parts.
Announce = Callable[[list[dict[str, Any]]], Collection[str]]
#: Called with a body of parts.
Store = Callable[[bytes], object]
#: Called with the bytes that were sent, and those that are to be sent in all.
Report = Callable[[int, int], object]


class Local(NamedTuple):
    """A local file or folder of a spec, and what it contains."""

    source: Path
    manifest: Manifest


def with_references(spec: Mapping[str, Any], known: Known) -> tuple[dict[str, Any], list[Local]]:
    """Return the JSON of a spec with references in place of local paths, and what they refer to. Raises ManifestError."""
    changed, found = copy.deepcopy(dict(spec)), list[Local]()

    def refer(key: str, source: str, name: str) -> str:
        if "://" in source:
            return source
        path = Path(os.path.abspath(source))  # noqa: PTH100 - links stay as they are
        try:
            manifest = manifest_of(path, name or path.name or WORKDIR, known)
        except ManifestError as error:
            raise ManifestError(f"{key}: {error}") from None
        found.append(Local(path, manifest))
        return manifest.reference

    if changed.get("workdir"):
        changed["workdir"] = refer("workdir", changed["workdir"], WORKDIR)
    for mount in changed.get("file_mounts") or ():
        key = f"file_mounts.{mount['path']}"
        mount["sources"] = [refer(key, source, "") for source in mount["sources"]]
    return changed, found


def send(local: Local, announce: Announce, store: Store, report: Report) -> int:
    """Send what the controller lacks of a file or folder; returns the bytes that were sent.

    Raises ManifestError, and what the calls raise. What was sent before an error or Ctrl-C need not be sent again.
    """
    sent, manifest = 0, local.manifest.to_json()
    for _ in range(_ROUNDS):
        missing = set(announce(manifest))
        if not missing:
            return sent
        sizes = local.manifest.parts()
        total = sent + sum(sizes[part] for part in missing if part in sizes)
        report(sent, total)
        for batch in _batches(local, missing):
            store(encode_parts(batch))
            sent += sum(map(len, batch.values()))
            report(sent, total)
    raise ManifestError(f"{local.source}: the controller lacks parts that were sent; try again")


def _batches(local: Local, missing: set[str]) -> Iterator[dict[str, bytes]]:
    """Yield the missing parts, each once, at most PART_BYTES at a time."""
    batch: dict[str, bytes] = {}
    for entry in local.manifest.entries:
        if entry.kind != FILE or missing.isdisjoint(entry.parts):
            continue
        inside = entry.path.partition("/")[2]
        path = local.source / inside if inside else local.source
        for place, digest in enumerate(entry.parts):
            if digest not in missing:
                continue
            missing.discard(digest)
            content = part_of(path, place, digest)
            if batch and (
                sum(map(len, batch.values())) + len(content) > PART_BYTES or len(batch) >= _MOST_PARTS
            ):
                yield batch
                batch = {}
            batch[digest] = content
    if batch:
        yield batch
