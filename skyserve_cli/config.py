"""`config.yaml` in the home: settings per user, not per service. All keys have defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from provisioners import plugins
from provisioners.offers.egress import Rates
from provisioners.own_address import ADDRESS_URL
from provisioners.registry import PROVISIONERS
from skyserve_cli.config_backup import BackupConfig
from skyserve_cli.config_clouds import SECTIONS, AwsConfig, RentedConfig
from skyserve_cli.config_listen import (
    ListenConfig,
    MemberConfig,
    TrustedProxyConfig,
    check_members,
    check_users,
)
from skyserve_cli.config_notify import Destination
from skyserve_cli.config_section import CloudConfig, Strict
from skyserve_cli.config_teams import TeamConfig, TeamName
from skyserve_cli.part_plugins import PartError, part_class
from skyserve_cli.spec.problems import did_you_mean, dotted

__all__ = [
    "Config",
    "ConfigError",
    "ControllerConfig",
    "ListenConfig",
    "LoadBalancerConfig",
    "RentedConfig",
    "load_config",
    "section_model",
]

_MAX_BYTES = 1 << 20
_TLS = "load balancers and probes reach replicas by TLS; for replicas to come"


class ConfigError(Exception):
    """The configuration file is wrong; the text names the place and the reason, a line per problem."""


class ControllerConfig(Strict):
    listen: ListenConfig | None = Field(
        default=None,
        description="port of the API for commands on other hosts, with the tokens of `serve token`. null: only the socket in "
        "the home",
    )
    tick_seconds: float = Field(default=1.0, gt=0.01, le=60, description="longest time between two ticks")
    sweep_minutes: float = Field(
        default=15.0,
        gt=0.001,
        le=1440,
        description="how often the clouds are searched for orphaned resources",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=1024,
        le=65535,
        description="port with the controller's Prometheus metrics at /metrics; the token is in metrics.token in the home. "
        "null: none",
    )
    metrics_host: str = Field(
        default="127.0.0.1",
        description="address of the metrics_port; another than loopback shows the metrics, with their token, to the network in "
        "clear",
    )
    max_usd_hour: float | None = Field(
        default=None,
        gt=0,
        description="what the machines of all services may cost together, USD per hour; beyond it no replica is launched. "
        "null: no limit",
    )
    backup: BackupConfig | None = Field(
        default=None, description="daily backup of the home to a bucket. null: none"
    )
    address_url: str | None = Field(
        default=ADDRESS_URL,
        pattern=r"^https?://",
        description="responds with this host's public address; called only if no nearer source knows it. null: never",
    )


class LoadBalancerConfig(Strict):
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


class DashboardConfig(Strict):
    port: int | None = Field(
        default=None,
        ge=1024,
        le=65535,
        description="port of 127.0.0.1 on which `serve dashboard` opens the page. null: any free one, kept from then on",
    )
    actions: bool = Field(
        default=False,
        description="whether the page may terminate replicas and services; otherwise it only reads",
    )
    hosts: tuple[str, ...] = Field(
        default=(), description="further host names under which the page may be called, of a proxy before it"
    )


class UnusableConfig(CloudConfig):
    """The section of a plug-in that cannot be loaded: nothing is known of its settings. Using the cloud gives the reason."""

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)


def section_model(name: str) -> type[CloudConfig]:
    """Return how the section of that cloud is read."""
    if name == "kubernetes":
        from skyserve_cli.config_kubernetes import KubernetesConfig  # which few configurations have

        return KubernetesConfig
    if name in SECTIONS or name in PROVISIONERS or name not in plugins.installed():
        return SECTIONS.get(name, CloudConfig)
    try:
        found = plugins.plugin(name).section
    except plugins.PluginError:
        return UnusableConfig
    if found is None:
        return RentedConfig
    return found if isinstance(found, type) and issubclass(found, RentedConfig) else UnusableConfig


def part_section(name: str) -> type[BaseModel]:
    """Return how the section of that part is read. Raises PartError."""
    return part_class(name).section or Strict


class Config(Strict):
    controller: ControllerConfig = ControllerConfig()
    load_balancer: LoadBalancerConfig = LoadBalancerConfig()
    dashboard: DashboardConfig = DashboardConfig()
    notify: tuple[Destination, ...] = Field(default=(), max_length=16)
    teams: dict[TeamName, TeamConfig] = Field(default_factory=dict, max_length=1000)
    users: tuple[MemberConfig, ...] = Field(default=(), max_length=10_000)
    groups: tuple[MemberConfig, ...] = Field(default=(), max_length=1000)
    clouds: dict[str, CloudConfig] = Field(default_factory=lambda: {"local": CloudConfig(poll_seconds=0.5)})
    parts: dict[str, BaseModel] = Field(default_factory=dict)

    @property
    def enabled(self) -> tuple[str, ...]:
        """The clouds that may be used."""
        return tuple(name for name, cloud in self.clouds.items() if cloud.enabled)

    @field_validator("notify")
    @classmethod
    def _names_once(cls, destinations: tuple[Destination, ...]) -> tuple[Destination, ...]:
        names = [one.name for one in destinations]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"there are two destinations with the name {name}")
        return destinations

    @model_validator(mode="after")
    def _members(self) -> Config:
        check_users(self.users)
        check_members("users", self.users, self.teams)
        check_members("groups", self.groups, self.teams)
        return self

    @field_validator("clouds", "parts", mode="plain")
    @classmethod
    def _each_as_its_own(cls, sections: object, info: ValidationInfo) -> dict[str, BaseModel]:
        """The section of a cloud or a part is read by its own model; an empty one has the defaults."""
        if not isinstance(sections, Mapping):
            raise ValueError(f"must be settings by the names of {info.field_name}")
        read, wrong = dict[str, BaseModel](), list[InitErrorDetails]()
        for name, section in sections.items():
            try:
                kind = (section_model if info.field_name == "clouds" else part_section)(str(name))
                read[name] = kind.model_validate({} if section is None else section)
            except PartError as error:
                kind_of_error = PydanticCustomError("no_part", "{why}", {"why": str(error)})
                wrong.append(InitErrorDetails(type=kind_of_error, loc=(name,), input=section))
            except ValidationError as error:
                wrong += [
                    InitErrorDetails(
                        type=PydanticCustomError(each["type"], each["msg"]),
                        loc=(name, *each["loc"]),
                        input=each["input"],
                    )
                    for each in error.errors()
                ]
        if wrong:
            raise ValidationError.from_exception_data(str(info.field_name), wrong)
        return read


def egress_rates(config: Config) -> dict[str, Rates]:
    """Return the configured prices of traffic out of regions, by cloud."""
    sections = config.clouds.items()
    return {name: one.egress_usd_per_gb.rates for name, one in sections if one.egress_usd_per_gb is not None}


def aws_profile(config: Config) -> str | None:
    """Return the profile of the AWS configuration files that `clouds.aws` names; None: the default one."""
    section = config.clouds.get("aws")
    return section.profile if isinstance(section, AwsConfig) else None


def load_config(path: Path) -> Config:
    """Return the configuration at `path`, or the defaults where there is none. Raises ConfigError."""
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
        raise ConfigError(
            "\n".join(
                f"{path}: {_sentence(each['loc'], each['type'], each['msg'])}" for each in error.errors()
            )
        ) from error


def _sentence(where: tuple[int | str, ...], kind: str, message: str) -> str:
    """Return one problem: the path in the file, and the sentence."""
    model, key = _model_above(where), str(where[-1]) if where else ""
    field = next((one for name, one in model.model_fields.items() if key in (name, one.alias)), None)
    if kind == "extra_forbidden":
        hint = did_you_mean(key, model.model_fields)
        is_own = where[0] in ("clouds", "parts")
        what = f"{where[1]} has no such setting" if is_own else "there is no such setting"
        message = f"{what}; {hint}" if hint else what
    elif kind in ("missing", "too_short") and field is not None:
        message = f"is missing ({field.description})"
    return ": ".join(filter(None, [dotted(where), message.removeprefix("Value error, ")]))


def _model_above(where: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the model that has, or lacks, the last key of the path."""
    match where:
        case ("clouds", str(name), _, *_):
            return section_model(name)
        case ("parts", str(name), _, *_):
            return part_section(name)
        case ("controller", "listen", "trusted_proxy", _, *_):
            return TrustedProxyConfig
        case ("controller", "listen", _, *_):
            return ListenConfig
        case ("controller", "backup", _, *_):
            return BackupConfig
        case ("controller", _, *_):
            return ControllerConfig
        case ("dashboard", _, *_):
            return DashboardConfig
        case ("load_balancer", _, *_):
            return LoadBalancerConfig
        case ("notify", int(), _, *_):
            return Destination
        case ("teams", _, _, *_):
            return TeamConfig
        case ("users" | "groups", int(), _, *_):
            return MemberConfig
        case _:
            return Config
