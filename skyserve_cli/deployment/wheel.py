"""A wheel of the release that runs here, made without a network or a build: of the files that are installed.

An editable installation has its files in a checkout. Of native modules, the wheel has those that fit the interpreter that it is for, and
without any it is a wheel for all. Equal files make equal bytes, so that the name of an installation follows from them.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePath
from typing import NamedTuple

import skyserve_cli
from lb.agent.native_files import NOTE
from provisioners.remote.host_agent.tls_relay import LIBRARY
from skyserve_cli.controller.balancers.native_modules import Choice
from skyserve_cli.output import CommandFailed

NAME = "skyserve"
PACKAGES = ("policies", "provisioners", "lb", "skyserve_cli", "skyserve")
ANY = "py3-none-any"
_LEFT_OUT = {"INSTALLER", "REQUESTED", "RECORD", "direct_url.json"}
_EPOCH = (2020, 1, 1, 0, 0, 0)


class Wheel(NamedTuple):
    """`digest` names its content."""

    file_name: str
    content: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()[:12]


def own_wheel(choice: Choice | None) -> Wheel:
    """Return the wheel of this program, with the native modules of the choice.

    Raises CommandFailed where it is not installed as a distribution.
    """
    try:
        found = distribution(NAME)
    except PackageNotFoundError:
        raise CommandFailed(
            "this program is not installed as a distribution, so no copy of it can be made; use --serve PATH"
        ) from None
    return packed(found, Path(skyserve_cli.__file__).parents[1], choice)


def packed(found: Distribution, sources: Path, choice: Choice | None = None) -> Wheel:
    """Return the wheel of a distribution whose packages are in the folder `sources`."""
    about = {path.parts[0] for path in found.files or () if path.parts[0].endswith(".dist-info")}
    if len(about) != 1:
        raise CommandFailed(f"the installation of {NAME} has no list of its files; use --serve PATH")
    (info,) = about
    metadata = {
        f"{info}/{path.name}": found.locate_file(path).read_bytes()  # type: ignore[attr-defined]
        for path in found.files or ()
        if path.parts[0] == info and path.name not in _LEFT_OUT
    }
    installed = {
        path.as_posix(): Path(str(found.locate_file(path)))
        for path in found.files or ()
        if path.parts[0] in PACKAGES and _is_for_all(path)
    }
    files = {name: path.read_bytes() for name, path in (installed or dict(_modules(sources))).items()}
    files.pop(NOTE, None)  # about the modules here
    tag = ANY
    if choice is not None and choice.native is not None:
        files |= choice.native.files
        tag = choice.python.tag
    if choice is not None and choice.why:
        files[NOTE] = f"{choice.why}\n".encode()
    is_pure = str(tag == ANY).lower()
    metadata[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: skyserve\nRoot-Is-Purelib: {is_pure}\nTag: {tag}\n".encode()
    )
    return Wheel(f"{info.removesuffix('.dist-info')}-{tag}.whl", _zipped({**files, **metadata}, info))


def _is_for_all(path: PurePath) -> bool:
    """Return whether a file fits every interpreter. The library of TLS needs none; where it does not fit it is not used."""
    if path.name == LIBRARY:
        return True
    return "__pycache__" not in path.parts and path.suffix not in (".so", ".pyc")


def _modules(sources: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of the packages by name, without what was compiled for this machine."""
    for package in PACKAGES:
        for path in sorted((sources / package).rglob("*")):
            if path.is_file() and _is_for_all(path):
                yield path.relative_to(sources).as_posix(), path


def _zipped(files: Mapping[str, bytes], info: str) -> bytes:
    record = "".join(
        f"{name},sha256={_hash(content)},{len(content)}\n" for name, content in sorted(files.items())
    )
    everything = {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sorted(everything.items()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    return buffer.getvalue()


def _hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
