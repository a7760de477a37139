"""`notify:` in `config.yaml`: who is notified of what. Secrets are in files of their own, never in the configuration or the database."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from skyserve_cli.config_section import Strict

Kind = Literal["short", "version_given_up", "crashes", "budget", "preemptions", "cut_off", "store", "backup"]


class Destination(Strict):
    """One receiver of notifications: a webhook or a command."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9-]{0,30}$", description="name in logs and for `serve notify test`"
    )
    webhook: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s@]+$",
        description="address that receives a POST; for one that is a secret: webhook_file",
    )
    webhook_file: Path | None = Field(
        default=None, description="file whose first line is the address, for example one of Slack"
    )
    secret_file: Path | None = Field(
        default=None,
        description="file with the key of the signature: 24 to 64 bytes in base64, by themselves or after whsec_. null: no signature",
    )
    command: str | None = Field(
        default=None,
        min_length=1,
        description="shell command that the controller runs, with SKYSERVE_… variables",
    )
    format: Literal["json", "slack", "discord"] = Field(default="json", description="body of the POST")
    kinds: tuple[Kind, ...] | None = Field(default=None, description="what to notify of. null: everything")
    services: tuple[str, ...] | None = Field(
        default=None, description="services to notify of, and the controller itself. null: all"
    )

    @field_validator("webhook_file", "secret_file")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        found = None if path is None else path.expanduser()
        if found is not None and not found.is_absolute():
            raise ValueError(f"{path} must be an absolute path, or begin with ~")
        return found

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = [name for name in ("webhook", "webhook_file", "command") if getattr(self, name) is not None]
        if len(ways) != 1:
            raise ValueError("exactly one of webhook, webhook_file and command must be set")
        if self.command is not None and (self.secret_file is not None or self.format != "json"):
            raise ValueError("secret_file and format are for webhooks, not for a command")
        for name in ("kinds", "services"):
            if getattr(self, name) == ():
                raise ValueError(f"{name} must not be empty; leave it out for all")
        return self

    def accepts(self, kind: str, service: str) -> bool:
        """Return whether a notification goes here. `service` is empty for those of the controller."""
        return (self.kinds is None or kind in self.kinds) and (
            self.services is None or not service or service in self.services
        )
