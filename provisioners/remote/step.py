"""A step on a machine, as a value: a script for its sh, with what it reads from standard input."""

from __future__ import annotations

from dataclasses import dataclass, field

QUICK_S = 60.0
TRANSFER_S = 3600.0


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes for a step's standard input."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Tree:
    """A file or folder of this machine for a step's standard input, as an archive in which it is called `name`."""

    path: str
    name: str


@dataclass(frozen=True, slots=True)
class Step:
    """`name` is fit for a file name, `doing` for people.

    It is over after `timeout_s`; one that failed is tried again until then if it has `retry_every_s`. `always`: done again
    whenever the machine is brought up again.
    """

    name: str
    doing: str
    script: str
    timeout_s: float = QUICK_S
    sends: Content | Tree | None = None
    retry_every_s: float | None = None
    always: bool = False
