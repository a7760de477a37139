"""`config.yaml` in the home: what is set once per user, not per service. All keys have defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
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
    pools: dict[str, Any] | None = Field(default=None, description="your own hosts, by pool")
    regions: tuple[str, ...] | None = Field(default=None, description="the only ones to look at")
    profile: str | None = Field(default=None, description="of the AWS configuration files")
    vpc: str | None = Field(default=None, description="id or name of the network to use")
    use_private_ip: bool = Field(default=False, description="machines are reached inside their network")
    image: str | None = Field(default=None, description="the cloud's own name of the image to boot")
    disk_gb: int | None = Field(default=None, ge=10, le=65536, description="of the boot disk")
    sources: tuple[str, ...] | None = Field(default=None, description="CIDR blocks that may reach machines")
    labels: dict[str, str] = Field(default={}, description="tags of all that is made")
    dead_man_minutes: int = Field(
        default=720,
        ge=0,
        le=43200,
        description="a machine that no controller has visited for so long ends itself; 0: never",
    )


_OF_ALL = frozenset({"enabled", "poll_seconds"})
_OF_CLOUD: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "ssh": frozenset({"pools"}),
        "aws": frozenset(
            {
                "regions",
                "profile",
                "vpc",
                "use_private_ip",
                "image",
                "disk_gb",
                "sources",
                "labels",
                "dead_man_minutes",
            }
        ),
    }
)


class Config(_Strict):
    controller: ControllerConfig = ControllerConfig()
    load_balancer: LoadBalancerConfig = LoadBalancerConfig()
    clouds: dict[str, CloudConfig] = {"local": CloudConfig(poll_seconds=0.5)}

    @model_validator(mode="after")
    def _settings_are_of_their_cloud(self) -> Config:
        strange = [
            f"clouds.{name}.{key}: {name} has no such setting"
            for name, cloud in self.clouds.items()
            for key in sorted(cloud.model_fields_set - _OF_ALL - _OF_CLOUD.get(name, frozenset()))
        ]
        if "ssh" in self.clouds and not self.clouds["ssh"].pools:
            strange.append("clouds.ssh.pools: must name your hosts, by pool")
        if strange:
            raise ValueError("; ".join(strange))
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
