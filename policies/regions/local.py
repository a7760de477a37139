"""No forwarding: every region serves its own clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from policies.regions.base import LocalCost, PeerView, RegionChoice, stay


class Local:
    """Keeps every request in the region that it entered."""

    name: ClassVar[str] = "local"
    needs_room: ClassVar[bool] = False
    knows_caches: ClassVar[bool] = False

    def choose(
        self, prompt_bytes: int, local: LocalCost, peers: Sequence[PeerView], left_s: float
    ) -> RegionChoice:
        return stay("requests never leave their region")
