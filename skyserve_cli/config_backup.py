"""`controller.backup` in `config.yaml`: where a sealed copy of the home goes once a day."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from skyserve_cli.buckets.port import BucketError, Place, place_of
from skyserve_cli.config_section import Strict


class BackupConfig(Strict):
    """The daily backup of the controller's state, keys and configuration."""

    to: str = Field(
        description="s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, https://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX or "
        "file:///FOLDER"
    )
    passphrase_file: Path = Field(
        description="file on the controller's host whose first line seals the backups; keep a copy of it elsewhere"
    )
    keep: int = Field(
        default=14, ge=1, le=3650, description="how many backups stay there; older ones are removed"
    )
    every_hours: float = Field(default=24.0, gt=0.001, le=168, description="time between two backups")

    @field_validator("to")
    @classmethod
    def _is_place(cls, to: str) -> str:
        try:
            place_of(to)
        except BucketError as error:
            raise ValueError(str(error)) from None
        return to

    @field_validator("passphrase_file")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        found = path.expanduser()
        if not found.is_absolute():
            raise ValueError(f"{path} must be an absolute path, or begin with ~")
        return found

    @property
    def place(self) -> Place:
        return place_of(self.to)
