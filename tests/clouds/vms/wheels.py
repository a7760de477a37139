"""The packages installed here, for machines without a network: as wheels, or as the files themselves."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

_OF_INSTALLERS = {"INSTALLER", "REQUESTED", "direct_url.json"}


def wheelhouse(folder: Path, names: Iterable[str]) -> Path:
    """The folder, with a wheel of each of these distributions and of all that they need."""
    folder.mkdir(parents=True, exist_ok=True)
    for found in _with_needs(names):
        _pack(folder, found)
    return folder


def copy_installed(folder: Path, names: Iterable[str]) -> None:
    """Copy the files of these distributions, and of all that they need, into the folder."""
    for found in _with_needs(names):
        for path in found.files or ():
            if ".." not in path.parts:  # a program, outside site-packages
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(found.locate_file(path)), target)


def _with_needs(names: Iterable[str]) -> Iterator[Distribution]:
    """These distributions and all that they need, each once."""
    to_do, seen = list(names), set[str]()
    while to_do:
        name = to_do.pop()
        if name not in seen:
            seen.add(name)
            found = distribution(name)
            yield found
            needs = map(Requirement, found.requires or ())
            to_do += [one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]


def _pack(folder: Path, found: Distribution) -> None:
    files = [path for path in found.files or () if ".." not in path.parts and "__pycache__" not in path.parts]
    (about,) = {path.parts[0] for path in files if path.parts[0].endswith(".dist-info")}
    lines = (found.read_text("WHEEL") or "").splitlines()
    tag = [line[5:] for line in lines if line.startswith("Tag: ")][-1]  # the first may be of Python 2
    name = f"{about.removesuffix('.dist-info')}-{tag}.whl"
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as wheel:
        for path in files:
            if path.name == "RECORD" and path.parts[0] == about:
                wheel.writestr(str(path), "".join(f"{one},,\n" for one in files))
            elif not (path.name in _OF_INSTALLERS and path.parts[0] == about):
                wheel.write(str(found.locate_file(path)), str(path))
