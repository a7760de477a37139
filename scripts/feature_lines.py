"""How many lines each part of the product takes, with its tests: what a feature costs to keep.

    python scripts/feature_lines.py            print the table, in Markdown
    python scripts/feature_lines.py --write    write it into CONTRIBUTING.md

A file of the product belongs to the part with the longest path that begins its own. A file of the tests belongs to the part whose modules it
imports, where a module counts for less the more files of tests import it. Helpers that import nothing of the product belong to no part, and tests
over the command line, which import as little, are a row of their own. Numbers are rounded to hundreds.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- feature lines: begin -->", "<!-- feature lines: end -->"
PRODUCT = ("skyserve", "skyserve_cli", "provisioners", "policies", "lb")
PARTS: Mapping[str, tuple[str, ...]] = {
    "AWS": ("provisioners/aws", "tests/clouds/aws"),
    "Azure": ("provisioners/azure", "tests/clouds/azure"),
    "Google Cloud": ("provisioners/gcp", "tests/clouds/gcp"),
    "Kubernetes": ("provisioners/kubernetes", "tests/clouds/kubernetes", "tests/kubernetes_real"),
    "Lambda": ("provisioners/lambda_labs", "tests/clouds/lambda_labs"),
    "this machine": ("provisioners/local",),
    "SSH hosts": ("provisioners/ssh",),
    "rented machines: set-up, agent on the host": ("provisioners/remote", "tests/clouds/vms"),
    "catalog, prices, permissions": ("provisioners/offers", "provisioners/permissions"),
    "what all clouds share": ("provisioners",),
    "placement: SpotHedge, RiskHedge and others": ("policies/placement",),
    "scaling and forecast": ("policies/scaling", "policies/forecast"),
    "routing": ("policies/routing", "lb/cache_events"),
    "regions": ("policies/regions", "lb/regions", "skyserve_cli/controller/balancers"),
    "other policies": ("policies",),
    "load balancer: HTTP and TLS": ("lb/http",),
    "load balancer: requests, retries, streams": ("lb/proxy", "lb/stream"),
    "load balancer: queue, limits, keys, models": ("lb/core", "lb/config"),
    "load balancer: engines and metrics": ("lb/engines", "lb/observe"),
    "load balancer: process": ("lb",),
    "controller: reconciliation": ("skyserve_cli/controller/reconcile",),
    "controller: API": ("skyserve_cli/controller/api",),
    "controller: state, backup": (
        "skyserve_cli/state",
        "skyserve_cli/controller/backup",
        "skyserve_cli/controller/persistence",
    ),
    "controller: teams, sessions, notifications, dashboard": (
        "skyserve_cli/controller/teams",
        "skyserve_cli/controller/sessions",
        "skyserve_cli/controller/notify",
        "skyserve_cli/controller/dashboard",
        "tests/browser",
    ),
    "controller: rest": ("skyserve_cli/controller",),
    "controller on another host": ("skyserve_cli/deployment",),
    "service file": ("skyserve_cli/spec",),
    "`serve init`, `serve why`, `serve profile`": (
        "skyserve_cli/starter",
        "skyserve_cli/causes",
        "skyserve_cli/profile",
    ),
    "simulator and reports": ("skyserve_cli/sim", "skyserve_cli/report"),
    "simulated engine": ("skyserve_cli/engine",),
    "commands and output": ("skyserve_cli", "skyserve"),
}
COMMAND_LINE, SHARED = "tests over the command line", "what tests share, and tests of docs and benchmarks"


def part_of(path: str) -> str | None:
    """Return the part that a path belongs to; None: none."""
    fitting = {
        begin: part
        for part, begins in PARTS.items()
        for begin in begins
        if f"{path}/".startswith(f"{begin}/")
    }
    return fitting[max(fitting, key=len)] if fitting else None


def tested_by(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the part that each file of the tests belongs to, by its path."""
    imported = {path: _imported(text) for path, text in texts.items()}
    importers = Counter(module for modules in imported.values() for module in modules)
    found = {}
    for path, modules in imported.items():
        weights: Counter[str] = Counter()
        for module in sorted(modules):
            weights[part_of(module) or SHARED] += 1 / importers[module]  # type: ignore[assignment]
        own = part_of(path) or (COMMAND_LINE if path.startswith("tests/e2e/") else None)
        found[path] = own or (max(weights, key=lambda part: weights[part]) if weights else SHARED)
    return found


def _imported(text: str) -> frozenset[str]:
    """Return the paths of the product's modules that are imported."""
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Import):
            names += [name.name for name in node.names]
    return frozenset(name.replace(".", "/") for name in names if name.split(".")[0] in PRODUCT)


def counted(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """Return the lines of product and of tests by part."""
    texts = {path: (root / path).read_text() for path in _files(root)}
    owners = tested_by({path: text for path, text in texts.items() if path.startswith("tests/")})
    product: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for path, text in texts.items():
        if path in owners:
            tests[owners[path]] += text.count("\n")
        else:
            product[part_of(path) or path] += text.count("\n")
    return {part: (product[part], tests[part]) for part in {**PARTS, COMMAND_LINE: (), SHARED: (), **product}}


def _files(root: Path) -> list[str]:
    folders = [root / name for name in (*PRODUCT, "tests")]
    return [str(file.relative_to(root)) for folder in folders for file in sorted(folder.rglob("*.py"))]


def table(lines: Mapping[str, tuple[int, int]]) -> str:
    """Return the parts in Markdown, the largest first."""
    rows = sorted(lines.items(), key=lambda row: -sum(row[1]))
    rows.append(("**all**", (sum(row[1][0] for row in rows), sum(row[1][1] for row in rows))))
    body = "".join(f"| {part} | {_hundreds(own)} | {_hundreds(tests)} |\n" for part, (own, tests) in rows)
    return f"| part | product | tests |\n|---|--:|--:|\n{body}"


def _hundreds(lines: int) -> str:
    return f"{round(lines, -2):,}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true")
    shown = table(counted())
    if not parser.parse_args().write:
        print(shown, end="")
        return 0
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    PAGE.write_text(f"{before}{begin}\n{shown}{end}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
