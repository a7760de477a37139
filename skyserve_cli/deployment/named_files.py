"""The files that config.yaml names: a controller on another host needs them there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

KEYS = frozenset(
    [
        "certfile",
        "certificate_file",
        "identity_file",
        "keyfile",
        "known_hosts",
        "kubeconfig",
        "passphrase_file",
        "secret_file",
        "webhook_file",
    ]
)


class NamedFile(NamedTuple):
    """`key` is the path of the key in config.yaml, `start` and `end` where the value is in its text."""

    key: str
    path: str
    start: int
    end: int


def named_files(text: str) -> list[NamedFile]:
    """Return every file that a configuration names, in its order."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return [] if root is None else list(_of(root, ""))


def _of(node: yaml.Node, key: str) -> Iterator[NamedFile]:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            below = f"{key}.{name.value}" if key else str(name.value)
            if isinstance(value, yaml.ScalarNode) and name.value in KEYS and value.tag.endswith(":str"):
                yield NamedFile(below, value.value, value.start_mark.index, value.end_mark.index)
            else:
                yield from _of(value, below)
    elif isinstance(node, yaml.SequenceNode):
        for place, value in enumerate(node.value):
            yield from _of(value, f"{key}[{place}]")


def copies_of(files: list[NamedFile]) -> dict[str, str]:
    """Return the name that each path gets in a folder for copies."""
    return {
        one.path: f"{hashlib.sha256(one.path.encode()).hexdigest()[:8]}-{Path(one.path).name}"
        for one in files
    }


def with_paths(text: str, files: list[NamedFile], folder: str) -> str:
    """Return the configuration with the paths of the copies in `folder`."""
    names = copies_of(files)
    for one in sorted(files, key=lambda one: one.start, reverse=True):
        text = text[: one.start] + json.dumps(f"{folder}/{names[one.path]}") + text[one.end :]
    return text
