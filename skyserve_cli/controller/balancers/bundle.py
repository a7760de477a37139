"""What an agent is made of, as one archive: the packages `lb` and `policies`, and the libraries they need, pinned.

The same code and the same libraries make the same bytes, so their hash is the version. Compiled files stay here: the
machine may be of another kind.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path

from skyserve_cli.controller.agent_files import package_folder

PACKAGES = ("lb", "policies")
LIBRARIES = ("aiohttp", "httptools", "orjson", "prometheus-client", "uvloop")
"""What the packages import; `pip` finds what these need in turn."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """`data` is a gzipped tar; `version` its content's hash, of 12 hexadecimal digits."""

    version: str
    data: bytes = field(repr=False)


@cache
def agent_bundle() -> Bundle:
    """Of the code that runs here."""
    return bundle_of((package, package_folder(package)) for package in PACKAGES)


def bundle_of(packages: Iterable[tuple[str, Path]], libraries: Iterable[str] = LIBRARIES) -> Bundle:
    """`packages` are names and folders, `libraries` names of installed distributions."""
    requirements = "".join(f"{name}=={version(name)}\n" for name in sorted(libraries))
    files = {"requirements.txt": requirements.encode()}
    for name, folder in packages:
        files |= {f"{name}/{path}": content for path, content in _sources(folder)}
    digest = hashlib.sha256()
    for path, content in sorted(files.items()):
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return Bundle(digest.hexdigest()[:12], _archive(files))


def _sources(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*.py")):
        yield path.relative_to(folder).as_posix(), path.read_bytes()


def _archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path, content in sorted(files.items()):
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
