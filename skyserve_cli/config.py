"""`config.yaml` in the home: what is set once per user, not per service. All keys have defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

_MAX_BYTES = 1 << 20


class ConfigError(Exception):
    """The configuration file is wrong; the text says where and why, a line per problem."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ControllerConfig(_Strict):
    tick_seconds: float = Field(default=1.0, gt=0.01, le=60, description="longest time between two ticks")


class LoadBalancerConfig(_Strict):
    host: str = Field(
        default="127.0.0.1", description="address endpoints listen on; 0.0.0.0 opens them to the network"
    )
    first_port: int = Field(default=30001, ge=1024, le=65000)
    last_port: int = Field(default=30999, ge=1024, le=65535)

    @model_validator(mode="after")
    def _in_order(self) -> LoadBalancerConfig:
        if self.last_port < self.first_port:
            raise ValueError("last_port must not be below first_port")
        return self


class CloudConfig(_Strict):
    enabled: bool = True
    poll_seconds: float | None = Field(
        default=None, gt=0.05, le=600, description="how often the cloud is listed"
    )
    pools: dict[str, Any] | None = Field(default=None, description="of `ssh`: your own hosts, by pool")


class Config(_Strict):
    controller: ControllerConfig = ControllerConfig()
    load_balancer: LoadBalancerConfig = LoadBalancerConfig()
    clouds: dict[str, CloudConfig] = {"local": CloudConfig(poll_seconds=0.5)}

    @model_validator(mode="after")
    def _pools_are_of_ssh(self) -> Config:
        for name, cloud in self.clouds.items():
            if name == "ssh" and not cloud.pools:
                raise ValueError("clouds.ssh.pools: must name your hosts, by pool")
            if name != "ssh" and cloud.pools is not None:
                raise ValueError(f"clouds.{name}.pools: only `ssh` has pools")
        return self


def load_config(path: Path) -> Config:
    """The configuration at `path`, or the defaults where there is none. Raises ConfigError."""
    if not path.exists():
        return Config()
    if path.stat().st_size > _MAX_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_BYTES} bytes")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    try:
        return Config.model_validate({} if content is None else content)
    except ValidationError as error:
        lines = [": ".join(filter(None, [str(path), _dotted(e["loc"]), e["msg"]])) for e in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def _dotted(where: tuple[int | str, ...]) -> str:
    return ".".join(map(str, where))
