"""What a spec has in place of a local path whose files were sent to the controller. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from skyserve_cli.controller.rejected import RejectedError

SCHEME = "upload://"

_REFERENCE = re.compile(r"upload://([0-9a-f]{64})/([^/\0]+)")


class ManifestError(RejectedError):
    """A file or folder cannot be sent, or a manifest is not acceptable; the text names the path and the reason."""


class Reference(NamedTuple):
    """What a spec has in place of a path: the manifest's id, and the name of the whole."""

    id: str
    name: str

    def below(self, uploads: Path) -> Path:
        """Return where the files are in that folder of the home."""
        return uploads / "trees" / self.id / self.name


def read_reference(text: str) -> Reference | None:
    """Return None for a path or the URL of a bucket. Raises ManifestError for a reference that cannot be right."""
    if not text.startswith(SCHEME):
        return None
    found = _REFERENCE.fullmatch(text)
    if found is None or found[2] in (".", ".."):
        raise ManifestError(f"{text[:200]!r} is no reference to uploaded files")
    return Reference(found[1], found[2])


def path_of(uploads: Path, source: str) -> str:
    """Return the path of uploaded files below that folder; other sources as they are."""
    reference = read_reference(source)
    return source if reference is None else str(reference.below(uploads))


def references_of(spec: Mapping[str, Any]) -> list[Reference]:
    """Return the uploaded files that the JSON of a spec names. Raises ManifestError."""
    mounts = spec.get("file_mounts") or ()
    sources = [source for mount in mounts for source in mount["sources"]]
    found = (read_reference(str(source)) for source in [spec.get("workdir") or "", *sources])
    return [reference for reference in found if reference is not None]
