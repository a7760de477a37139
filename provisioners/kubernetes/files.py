"""The work directory and the files of a service, as Secrets: they reach the Pod without any connection to it.

A Secret holds 1 MiB at most (its size is limited by etcd), so an archive is cut into pieces, and all of them together are
limited too. What is larger belongs into the image or into a bucket.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import cast

from provisioners.kubernetes.errors import CLOUD
from provisioners.port.base import LaunchOrder, is_url
from provisioners.port.errors import InvalidRequestError
from provisioners.remote.archive import PackingError, pack
from provisioners.remote.bootstrap_steps import missing_sources

PIECE = 900_000  # bytes of an archive in one Secret
MOST = 8 * 1024**2  # of all archives


@dataclass(frozen=True, slots=True)
class PackedFiles:
    """`pieces` are the contents of one Secret each, by key; `targets` the folder that archive number I is unpacked in.

    `copied` says for each target of `file_mounts` where its files are then.
    """

    pieces: tuple[Mapping[str, bytes], ...] = ()
    targets: tuple[str, ...] = ()
    copied: Mapping[str, str] = field(default_factory=dict)


def packed(order: LaunchOrder) -> PackedFiles:
    """Return the files of an order. Raises InvalidRequestError if there are none, or too many."""
    missing = missing_sources(order)
    if missing:
        raise InvalidRequestError("; ".join(missing), cloud=CLOUD, zone=order.offer.zone)
    archives: list[bytes] = []
    targets: list[str] = []
    copied: dict[str, str] = {}
    left = MOST
    if order.workdir is not None:
        archives.append(_archive(order, Path(order.workdir), "work", left))
        targets.append(".")
    for target, source in order.file_mounts.items():
        if is_url(source):
            continue
        name = PurePosixPath(target).name or "files"
        folder = f"mounts/{len(archives):02d}"
        left = MOST - sum(map(len, archives))
        archives.append(_archive(order, Path(source).expanduser(), name, left))
        targets.append(folder)
        copied[target] = f"{folder}/{name}"
    pieces = tuple(
        {f"{number:02d}-{start // PIECE:03d}": archive[start : start + PIECE]}
        for number, archive in enumerate(archives)
        for start in range(0, len(archive), PIECE)
    )
    return PackedFiles(pieces, tuple(targets), copied)


class _Bounded(io.BytesIO):
    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.tell() + len(data) > self.most:
            raise OverflowError
        return super().write(data)


def _archive(order: LaunchOrder, source: Path, name: str, most: int) -> bytes:
    stream = _Bounded(most)
    try:
        pack(source, name, cast(io.BytesIO, stream))
    except PackingError as error:
        raise InvalidRequestError(str(error), cloud=CLOUD, zone=order.offer.zone) from error
    except OverflowError as error:
        raise InvalidRequestError(
            f"{source} and the other files have more than {MOST // 1024**2} MiB when packed, which is what fits into "
            "Secrets: name what is not needed in .skyignore, put it into the image, or mount a bucket",
            cloud=CLOUD,
            zone=order.offer.zone,
        ) from error
    return stream.getvalue()
