"""Relative links of the README and of the pages below docs/ lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def slug(heading: str) -> str:
    """Returns the anchor of a heading, as GitHub and Python-Markdown make it for ASCII text."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def broken(page: Path) -> list[str]:
    """Returns the links of a page that lead nowhere."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n\n[a](page.md#one) [b](page.md#two) [c](missing.md) [d](https://example.com/x)\n")
    assert broken(page) == ["page.md#two", "missing.md"]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("howto/*.md")), ids=lambda page: page.stem)
def test_the_index_lists_every_guide(page: Path) -> None:
    assert f"(howto/{page.name})" in (ROOT / "docs" / "index.md").read_text()


_PATH = re.compile(
    r"`((?:tests|lb|skyserve_cli|provisioners|policies|docs|benchmarks|scripts)/[\w./-]+)(?:::(\w+))?`"
)


@pytest.mark.parametrize(("path", "name"), sorted(set(_PATH.findall((ROOT / "CONTRIBUTING.md").read_text()))))
def test_files_and_tests_that_contributors_are_sent_to_exist(path: str, name: str) -> None:
    if "NAME" in path or "CLOUD" in path:  # a pattern for a file that is still to be written
        return
    assert (ROOT / path).exists()
    assert not name or f"def {name}(" in (ROOT / path).read_text()
