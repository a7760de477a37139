"""The client: calls of the controller of one home, and waiting for what they set off."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyserve.values import Event, Plan, Service
from skyserve_cli.commands import down as down_command
from skyserve_cli.commands import files, progress
from skyserve_cli.commands import update as update_command
from skyserve_cli.commands.prices import listed_plan
from skyserve_cli.controller.api.client import AWAY, ControllerClient, ControllerDownError
from skyserve_cli.controller.api.remote import remote_of
from skyserve_cli.controller.api.waiting import DeadlineError
from skyserve_cli.controller.reconcile.clock import SteadyClock
from skyserve_cli.home import Home
from skyserve_cli.output import CommandFailed
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.load import Loaded

POLL_S = 0.2
PAGE = 1000  # events per call


class ServiceFailedError(Exception):
    """The service cannot do what was requested; the text says why and what to do next."""


class WaitTimeoutError(TimeoutError):
    """What was waited for has not happened in time. It goes on without this process."""


class Client:
    """Calls of the controller of one home (that of `$SKYSERVE_HOME`, or `~/.skyserve`), or of the context in use.

    Every method may raise ControllerDownError, UnreachableError for a context, `RefusedError` where the controller rejects a call, and
    DeadlineError (a TimeoutError) where it does not respond in time.
    """

    def __init__(self) -> None:
        home = Home.from_environment(os.environ)
        self._calls = ControllerClient(home, remote_of(home, os.environ))
        self._clock = SteadyClock()

    def load(
        self,
        file: str | Path,
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        changes: Sequence[str] = (),
    ) -> Loaded:
        """Return the spec of a service file.

        `env` and `secrets` go before those of the file, `changes` are as `--set` has them (`replicas=2`). Relative paths in
        the file start at the current directory. Raises SpecError with every problem.
        """
        return files.read(
            Path(file), name=name, env=_pairs(env), secret=_pairs(secrets), changes=list(changes)
        )

    def plan(self, spec: Loaded | str | Path) -> Plan:
        """Return what `up` would launch. Without a controller: at the prices of the catalog."""
        loaded = self._loaded(spec)
        try:
            return Plan.of(self._calls.plan(spec_to_json(loaded.spec), loaded.secret_values))
        except ControllerDownError:
            return Plan.of(listed_plan(loaded.spec))

    def up(self, spec: Loaded | str | Path, *, wait: bool = True, timeout_s: float | None = None) -> Service:
        """Bring a new service up. Starts a controller if none runs.

        Returns when `min_replicas` replicas serve, or at once without `wait`. Raises ServiceFailedError if the service is
        there already or no replica starts, WaitTimeoutError after `timeout_s`.
        """
        loaded = self._loaded(spec)
        name = loaded.spec.name
        self._calls.ensure_running()
        if any(view["name"] == name for view in self._calls.services()):
            raise ServiceFailedError(f"service {name} is up; use update(), or take it down first")
        version = self._calls.put(name, spec_to_json(loaded.spec), loaded.secret_values, None)
        if wait:
            self._wait_for_version(loaded, version, timeout_s)
        return self.status(name)

    def update(
        self,
        spec: Loaded | str | Path,
        *,
        mode: str | None = None,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> Service:
        """Give the service of this name a new version.

        `mode` is "rolling" or "blue_green"; None: that of the file. Returns when the new version alone serves, or at once
        without `wait`. Raises ServiceFailedError if there is no such service or the version is given up (the old one goes on
        serving), WaitTimeoutError after `timeout_s`.
        """
        loaded = self._loaded(spec)
        name = loaded.spec.name
        self.status(name)
        chosen = mode or loaded.spec.update.mode
        version = self._calls.put(name, spec_to_json(loaded.spec), loaded.secret_values, chosen)
        if wait:
            self._wait_for_version(loaded, version, timeout_s)
        return self.status(name)

    def status(self, name: str) -> Service:
        """Return a service. Raises ServiceFailedError if there is none of this name."""
        for service in self.services():
            if service.name == name:
                return service
        raise ServiceFailedError(f"there is no service {name!r}")

    def services(self) -> list[Service]:
        """Return every service that is up or still going down."""
        return [Service.of(view) for view in self._calls.services()]

    def events(self, name: str | None = None, *, after: int = 0, follow: bool = False) -> Iterator[Event]:
        """Yield events after the event number `after`, oldest first; of all services without `name`.

        With `follow` the iteration does not end: it waits for further events.
        """
        while True:
            page = self._calls.events(name, after=after, limit=PAGE)
            for event in page:
                after = event["seq"]
                yield Event.of(event)
            if page:
                continue
            if not follow:
                return
            time.sleep(POLL_S)

    def down(
        self, name: str, *, purge: bool = False, wait: bool = True, timeout_s: float | None = None
    ) -> None:
        """Take a service down. `purge`: do not wait for requests to finish, and remove the folders of `cache` from own hosts.

        Returns when no replica is left and the clouds list nothing of it any more, or at once without `wait`. Raises
        ServiceFailedError with what cannot be removed, WaitTimeoutError after `timeout_s`.
        """
        self._calls.down(name, purge=purge)
        if not wait:
            return
        ends_at = None if timeout_s is None else self._clock.now() + timeout_s
        self._wait(name, down_command.is_gone, timeout_s)
        left_s = None if ends_at is None else max(0.0, ends_at - self._clock.now())
        try:
            down_command.tidy(self._calls, [name], left_s, inform=lambda line: None)
        except CommandFailed as error:
            raise ServiceFailedError(str(error)) from None

    # --- waiting

    def _loaded(self, spec: Loaded | str | Path) -> Loaded:
        return spec if isinstance(spec, Loaded) else self.load(spec)

    def _wait_for_version(self, loaded: Loaded, version: int, timeout_s: float | None) -> None:
        name, wanted = loaded.spec.name, loaded.spec.scaling.min_replicas

        def has_come(view: dict[str, Any]) -> bool:
            if view["status"] == "FAILED":
                raise CommandFailed(f"{name}: {progress.why_failed(self._calls, name, view['version'])}")
            return update_command.has_taken_over(self._calls, view, version, wanted)

        self._wait(name, has_come, timeout_s)

    def _wait(self, name: str, done: Callable[[dict[str, Any]], bool], timeout_s: float | None) -> None:
        """Poll a service until `done`. A controller that restarts is given time to come back."""
        try:
            with self._calls.waiting.within(timeout_s, progress.CALL_TIMEOUT_S):
                self._poll(name, done, timeout_s)
        except DeadlineError as error:
            raise WaitTimeoutError(f"{name}: {error}") from None

    def _poll(self, name: str, done: Callable[[dict[str, Any]], bool], timeout_s: float | None) -> None:
        started = responded = self._clock.now()
        etag = ""
        while True:
            try:
                views, etag, _ = self._calls.services_since(etag, down=True)
                responded = self._clock.now()
                if views is not None and done(next(view for view in views if view["name"] == name)):
                    return
            except AWAY:
                if self._clock.now() - responded > progress.AWAY_PATIENCE_S:
                    raise
            except CommandFailed as error:
                raise ServiceFailedError(str(error)) from None
            if timeout_s is not None and self._clock.now() - started > timeout_s:
                raise WaitTimeoutError(f"{name}: not done after {timeout_s:g} s; it goes on")
            time.sleep(POLL_S)


def _pairs(values: Mapping[str, str] | None) -> list[str]:
    return [f"{name}={value}" for name, value in (values or {}).items()]
