"""The clouds that are enabled here, made when they are first used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, cast

from provisioners.base import Provisioner, Requirements
from provisioners.catalog import load
from provisioners.clock import unix_now
from provisioners.local.cloud import LocalProvisioner
from provisioners.registry import provisioner_class
from skyserve_cli.config import Config, ConfigError
from skyserve_cli.home import Home

if TYPE_CHECKING:
    from skyserve_cli.controller.names import Publisher


class CloudNotEnabledError(Exception):
    """A candidate names a cloud that is not enabled here."""


@dataclass(slots=True)
class Clouds:
    """Provisioners by name."""

    home: Home
    config: Config
    _made: dict[str, Provisioner] = field(default_factory=dict)
    _names: Publisher | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def enabled(self) -> tuple[str, ...]:
        return tuple(name for name, cloud in self.config.clouds.items() if cloud.enabled)

    def get(self, name: str) -> Provisioner:
        with self._lock:
            if name not in self._made:
                self._made[name] = self._make(name)
            return self._made[name]

    def all(self) -> list[Provisioner]:
        return [self.get(name) for name in self.enabled]

    def poll_s(self) -> dict[str, float]:
        chosen = {name: cloud.poll_seconds for name, cloud in self.config.clouds.items()}
        return {name: seconds for name, seconds in chosen.items() if seconds is not None}

    def resolve(self, need: Requirements) -> Requirements:
        """`need` restricted to enabled clouds. A candidate that names none means any of them, but this machine
        itself (`local`) only if it is named or there is nothing else. Raises CloudNotEnabledError if nothing
        is left."""
        remote = [name for name in self.enabled if name != "local"]
        kept = []
        for candidate in need.candidates:
            if candidate.cloud is None:
                kept += [replace(candidate, cloud=name) for name in remote or self.enabled]
            elif candidate.cloud in self.enabled:
                kept.append(candidate)
        if not kept:
            named = sorted({candidate.cloud for candidate in need.candidates if candidate.cloud})
            wanted = (
                f"only on {' or '.join(named)}, and none of them is enabled here"
                if named
                else "no cloud is enabled"
            )
            raise CloudNotEnabledError(
                f"resources: {wanted} (enabled: {', '.join(self.enabled) or 'none'}); "
                f"name an enabled cloud in `infra`, or enable one in {self.home.config}"
            )
        return replace(need, candidates=tuple(kept))

    def names(self) -> Publisher:
        """Route 53, with the credentials that `aws` has here; also if no machine is ever rented there."""
        with self._lock:
            if self._names is None:
                route53 = import_module("provisioners.aws.names")
                section = self.config.clouds.get("aws")
                profile = None if section is None else section.profile
                self._names = cast("Publisher", route53.Route53Names(profile, unix_now, time.sleep))
            return self._names

    def name_region(self, cloud: str, region: str) -> str:
        """The region of Route 53 by which an agent in that one is found."""
        nearest: str = import_module("provisioners.aws.names").nearest_region(cloud, region)
        return nearest

    def _make(self, name: str) -> Provisioner:
        """What each cloud's constructor takes. Raises UnknownCloudError, and ConfigError for what it makes of its
        section."""
        cloud = provisioner_class(name)
        if issubclass(cloud, LocalProvisioner):
            return cloud(self.home.root)
        build = cast("Callable[..., Provisioner]", cloud)
        section = self.config.clouds[name]
        try:
            if name == "ssh":
                return build(section.pools or {}, self.home.machine_secret())
            if name == "aws":
                return build(section, load(self.home.root).of(name), self.home.machine_secret())
        except ValueError as error:
            raise ConfigError(f"{self.home.config}: {error}") from error
        return build()
