"""Writes the plain manifests of a controller in Kubernetes from the Helm chart: `python -m scripts.manifests`.

The chart in `deploy/helm/skyserve` is the source; a folder of `deploy/kubernetes` is the chart with some values, a file per template, and a
`kustomization.yaml` to build on. Helm itself renders them, as the library `helm_python`. `serve controller deploy kubernetes/…` applies those of
controllers: in the package they are one file each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1] / "deploy"
CHART = ROOT / "helm" / "skyserve"
PACKAGED = ROOT.parent / "skyserve_cli" / "deployment" / "manifests"
NAMESPACE = "skyserve"


class Variant(NamedTuple):
    """A folder, the values that it is the chart with, and the templates of which it consists (none: all)."""

    folder: str
    about: str
    values: Mapping[str, Any]
    templates: tuple[str, ...] = ()


VARIANTS = (
    Variant("two-controllers", "Two controllers of one PostgreSQL, of which one leads.", {"controllers": 2}),
    Variant("one-controller", "One controller, whose state is SQLite on a volume.", {"controllers": 1}),
    Variant(
        "monitoring",
        "The metrics of two controllers, for the Prometheus operator.",
        {"serviceMonitor": {"enabled": True}},
        ("monitoring.yaml",),
    ),
)


def rendered(values: Mapping[str, Any], namespace: str = NAMESPACE) -> dict[str, str]:
    """Return the chart's manifests by the names of their templates, without those that are empty."""
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(dict(values))
        found = chart.render(dict(values), name="skyserve", namespace=namespace)
    texts = {Path(path).name: text.strip() for path, text in found.items()}
    return {name: f"{text}\n" for name, text in texts.items() if text and name != "NOTES.txt"}


def files_of(variant: Variant) -> dict[str, str]:
    """Return the content of the variant's files by their names."""
    found = {
        name: text
        for name, text in rendered(variant.values).items()
        if not variant.templates or name in variant.templates
    }
    listed = "".join(f"  - {name}\n" for name in sorted(found))
    head = f"# {variant.about} Made from deploy/helm/skyserve by `python -m scripts.manifests`.\n"
    kustomization = (
        f"{head}apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n{listed}"
    )
    return {**found, "kustomization.yaml": kustomization}


def packaged() -> dict[str, str]:
    """Return the files of the package by their names: each is all objects of a folder."""
    found = {}
    for variant in VARIANTS:
        if not variant.templates:
            head = f"# {variant.about} Made from deploy/helm/skyserve by `python -m scripts.manifests`.\n"
            texts = [text for _, text in sorted(rendered(variant.values).items())]
            found[f"{variant.folder}.yaml"] = head + "---\n".join(texts)
    return found


def main() -> None:
    PACKAGED.mkdir(exist_ok=True)
    for name, text in packaged().items():
        (PACKAGED / name).write_text(text)
    for variant in VARIANTS:
        folder = ROOT / "kubernetes" / variant.folder
        folder.mkdir(parents=True, exist_ok=True)
        wanted = files_of(variant)
        for path in folder.iterdir():
            if path.name not in wanted:
                path.unlink()
        for name, text in wanted.items():
            (folder / name).write_text(text)


if __name__ == "__main__":
    main()
