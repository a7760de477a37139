"""Draws the two state diagrams of ARCHITECTURE.md from the tables in the code.

    python scripts/pictures.py            # writes them into ARCHITECTURE.md
    python scripts/pictures.py --check    # exits with 1 if a diagram in ARCHITECTURE.md is out of date

A diagram stands between `<!-- picture: NAME -->` and `<!-- end of picture -->`. Edges that lead back to the same state are
left out, and edges between the same two states share one arrow.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from lb.proxy.states import TABLE
from policies.lifecycle import TRANSITIONS

PAGE = Path(__file__).resolve().parents[1] / "ARCHITECTURE.md"
END = "<!-- end of picture -->"
Edge = tuple[str, str, str]  # from, label, to


def request_edges() -> list[Edge]:
    """The transitions of a request in the load balancer, in the order of the table."""
    return [(one.value, event.value, to.value) for one, row in TABLE.items() for event, to in row.items()]


def replica_edges() -> list[Edge]:
    """The transitions of a replica, in the order of the table."""
    return [
        (one.value, kind.__name__, to.value) for one, row in TRANSITIONS.items() for kind, to in row.items()
    ]


def diagram(first: str, edges: Iterable[Edge]) -> str:
    """Returns the edges as a mermaid state diagram that starts in `first`."""
    labels: dict[tuple[str, str], list[str]] = {}
    sources: set[str] = set()
    for start, label, to in edges:
        sources.add(start)
        if start != to:
            labels.setdefault((start, to), []).append(label)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    lines += [f"    {start} --> {to}: {', '.join(names)}" for (start, to), names in labels.items()]
    final = dict.fromkeys(to for _, to in labels if to not in sources)
    lines += [f"    {state} --> [*]" for state in final]
    return "\n".join([*lines, "```"])


def diagrams() -> dict[str, str]:
    """Returns every diagram by its name."""
    return {
        "request": diagram("choosing", request_edges()),
        "replica": diagram("REQUESTED", replica_edges()),
    }


def with_diagrams(text: str, drawn: Mapping[str, str]) -> str:
    """Returns `text` with the diagrams between their markers. Raises ValueError if a marker is missing."""
    for name, picture in drawn.items():
        before, begin, rest = text.partition(f"<!-- picture: {name} -->\n")
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"no markers for the picture {name!r}")
        text = f"{before}{begin}{picture}\n{end}{after}"
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the state diagrams of ARCHITECTURE.md from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if out of date")
    options = parser.parse_args(arguments)
    old = PAGE.read_text(encoding="utf-8")
    new = with_diagrams(old, diagrams())
    if old == new:
        return 0
    if options.check:
        print("ARCHITECTURE.md is out of date: run python scripts/pictures.py", file=sys.stderr)
        return 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
