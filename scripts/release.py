"""What a release must agree on, and what it says of itself.

python scripts/release.py check VERSION    exit with 1 unless the package, the chart and the changelog have this version
python scripts/release.py notes VERSION    print its section of the changelog
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def notes(version: str, changelog: str) -> str:
    """Return the section of a version, without its heading; empty if there is none."""
    found = re.search(rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)", changelog, re.M | re.S)
    return found[1].strip() if found else ""


def disagreements(version: str, root: Path = ROOT) -> list[str]:
    """Return what has another version, a sentence each."""
    chart = yaml.safe_load((root / "deploy/helm/skyserve/Chart.yaml").read_text())
    found = {
        "pyproject.toml": tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"],
        "the version of the chart": chart["version"],
        "the appVersion of the chart": chart["appVersion"],
    }
    wrong = [f"{what} is {has}, not {version}" for what, has in found.items() if has != version]
    if not notes(version, (root / "CHANGELOG.md").read_text()):
        wrong.append(f"CHANGELOG.md has no section [{version}]")
    return wrong


def main() -> int:
    if len(sys.argv) != 3 or sys.argv[1] not in ("check", "notes"):
        print(__doc__, file=sys.stderr)
        return 2
    version = sys.argv[2]
    if sys.argv[1] == "notes":
        print(notes(version, (ROOT / "CHANGELOG.md").read_text()))
        return 0
    wrong = disagreements(version)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
