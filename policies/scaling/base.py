"""The port of a scaler."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from policies.model import Json, Observation


class Outlook(NamedTuple):
    """The part of a forecast beside the size, in replicas.

    `now`: as many serve the present demand. `then`: as many of those wanted are surely still wanted when a replica launched now
    would be ready; the others go before. `later`: at index i the chance that the demand of that time needs i replicas more
    than are wanted.
    """

    now: int
    then: int
    later: tuple[float, ...]


class Size(NamedTuple):
    """How many replicas the load needs, and what to remember.

    The third value is the earliest instant at which the result may differ although the load does not (None: never). `why` is a
    sentence for the event log where the size changes, and `qps` what the replicas have to carry together, where they differ in
    what they can do. `outlook` is None where nothing is forecast.
    """

    wanted: int
    memory: Json
    wake_at: float | None = None
    why: str = ""
    qps: float | None = None
    outlook: Outlook | None = None


class Scaler(Protocol):
    """Decides the number of replicas that should be serving."""

    def target(self, observation: Observation, memory: Json) -> Size:
        """Return the wanted number (over-provisioning not included). Pure."""
        ...
