"""The spec: a YAML file in, one frozen `ServiceSpec` (or every reason why not) out.

Nothing in the file is dropped in silence, every mistake is reported at
once and by its path in the file, and nothing but `SpecError` comes out of wrong text. Nothing here knows a clock, a
cloud, a database or the process's own environment; what a file may refer to is passed in. The rest of the product
sees `model` and never YAML, pydantic or a default. Secrets are in the spec by name; their values stay beside it.

The way through it is one page, `load.load_text`: text -> tree (`yaml_tree`) -> overrides -> variables -> sections
(`schema`, `check`) -> rules between keys (`rules`, `candidates`) -> spec (`build`). `reference.yaml` is the
documentation of every key, an example, and a fixture of the tests. What the controller's API is sent goes the same way
from `check` on (`sent`), so a controller imports nothing of YAML.

The format is that of the SkyServe paper's Listing 1 (arXiv 2411.01438) and of SkyPilot's released service files,
with keys of our own beside theirs.
"""

from importlib.resources import files

from policies.goals import AcceleratorQps
from skyserve_cli.spec.codec import spec_from_json, spec_to_json
from skyserve_cli.spec.model import (
    FileMount,
    GitSource,
    LoadBalancerSpec,
    Probe,
    ResourceChoice,
    ServiceSpec,
    Tls,
    UpdateSpec,
)
from skyserve_cli.spec.problems import Problem, SpecError, SpecWarning
from skyserve_cli.spec.sent import sent_spec

__all__ = [
    "AcceleratorQps",
    "FileMount",
    "GitSource",
    "LoadBalancerSpec",
    "Probe",
    "Problem",
    "ResourceChoice",
    "ServiceSpec",
    "SpecError",
    "SpecWarning",
    "Tls",
    "UpdateSpec",
    "reference_text",
    "sent_spec",
    "spec_from_json",
    "spec_to_json",
]


def reference_text() -> str:
    """Return the commented reference of every key, itself a valid file."""
    return files(__name__).joinpath("reference.yaml").read_text(encoding="utf-8")
