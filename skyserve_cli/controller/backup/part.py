"""Backups to a bucket as a part of the controller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyserve_cli.buckets.opening import bucket_at
from skyserve_cli.config import aws_profile
from skyserve_cli.controller.backup.uploader import BackupUploader
from skyserve_cli.controller.part import Kernel, Part


class BackupPart(Part):
    """Makes a backup a day, if one is configured."""

    name = "backup"

    def __init__(self, kernel: Kernel) -> None:
        config, profile = kernel.config.controller.backup, aws_profile(kernel.config)
        self._uploader = None
        if config is not None:
            place = config.place
            self._uploader = BackupUploader(
                kernel.home,
                config,
                lambda: bucket_at(place, aws_profile=profile),
                kernel.store,
                kernel.clock,
            )

    def lead(self) -> None:
        if self._uploader is not None:
            self._uploader.start()

    async def stop(self) -> None:
        if self._uploader is not None:
            self._uploader.stop()

    def row(self) -> Mapping[str, Any]:
        uploader = self._uploader
        return {"backup": uploader.view() if uploader is not None and uploader.is_alive() else None}
