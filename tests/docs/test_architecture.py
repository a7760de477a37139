"""ARCHITECTURE.md agrees with the tree: packages, paths and state diagrams."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from policies.lifecycle import TRANSITIONS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("skyserve", "skyserve_cli", "provisioners", "policies", "lb")
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
# `lb/core/queue.py`, `lb/core/` or `lb/core`: what begins with a package and has a slash.
NAMED = sorted(set(re.findall(rf"`((?:{'|'.join(PACKAGES)})/[\w./-]*)`", TEXT)))


def load_pictures() -> ModuleType:
    """`scripts/pictures.py`, which is in no package."""
    found = importlib.util.spec_from_file_location("pictures", ROOT / "scripts" / "pictures.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


pictures = load_pictures()


def folders() -> Iterator[str]:
    """Every directory of the packages that holds files, without caches."""
    for package in PACKAGES:
        for path in [ROOT / package, *(ROOT / package).rglob("*")]:
            if path.is_dir() and path.name != "__pycache__" and any(one.is_file() for one in path.iterdir()):
                yield path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("folder", sorted(folders()))
def test_every_package_is_named(folder: str) -> None:
    assert f"`{folder}/`" in TEXT, f"ARCHITECTURE.md does not say what {folder}/ is for"


@pytest.mark.parametrize("path", NAMED)
def test_every_path_exists(path: str) -> None:
    found = ROOT / path
    assert found.is_dir() if path.endswith("/") else found.exists()


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^):#]+)\)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []


@pytest.mark.parametrize("name", pictures.diagrams())
def test_the_diagram_is_up_to_date(name: str) -> None:
    assert pictures.diagrams()[name] in TEXT, "run python scripts/pictures.py"


def test_the_diagram_of_a_replica_has_every_transition() -> None:
    drawn = pictures.diagrams()["replica"]
    for state, row in TRANSITIONS.items():
        for kind, to in row.items():
            arrow = re.search(rf"^ *{state.value} --> {to.value}: (.+)$", drawn, re.MULTILINE)
            assert state is to or (arrow is not None and kind.__name__ in arrow[1].split(", "))


def test_a_missing_marker_is_an_error() -> None:
    with pytest.raises(ValueError, match="no markers for the picture 'replica'"):
        pictures.with_diagrams("# Architecture\n", {"replica": "…"})
