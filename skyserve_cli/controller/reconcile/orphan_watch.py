"""Instances of this controller that no row knows: abandoned after two listings of their cloud have shown them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from skyserve_cli.controller.reconcile.listing_events import orphans
from skyserve_cli.controller.reconcile.mappers import token_of
from skyserve_cli.controller.reconcile.ports import InstanceListing, OperationRunner
from skyserve_cli.state.values import ServiceRow

if TYPE_CHECKING:
    from skyserve_cli.controller.reconcile.adoption import Adoption

#: Listings of a cloud in which a controller that has just started believes nothing to be an orphan.
LISTINGS_BEFORE_ORPHANS = 2


class OrphanWatch:
    """Remembers the suspects of each cloud. `seen` counts the listings of each cloud since this process started."""

    def __init__(
        self, owner: str, runner: OperationRunner, seen: Mapping[str, int], adoption: Adoption | None
    ) -> None:
        self._owner = owner
        self._runner = runner
        self._seen = seen
        self._adoption = adoption
        self._suspects: dict[str, frozenset[str]] = {}
        self._tokens: dict[
            tuple[str, str], dict[int, str]
        ] = {}  # of each replica, by service and incarnation

    def abandon(self, listings: Sequence[InstanceListing], rows: Iterable[ServiceRow]) -> None:
        """Order the end of orphans. `rows` were read after the clouds were listed, so every intent in a listing is in them."""
        tokens = self._known_tokens(rows)
        for listing in listings:
            suspects = self._suspects.get(listing.cloud, frozenset())
            found, self._suspects[listing.cloud] = orphans(listing, tokens, suspects)
            is_early = self._seen[listing.cloud] <= LISTINGS_BEFORE_ORPHANS
            for orphan in () if is_early else found:
                if self._adoption is not None and self._adoption.spares(orphan):
                    continue
                self._runner.abandon(orphan)

    def _known_tokens(self, rows: Iterable[ServiceRow]) -> frozenset[str]:
        """Return the tokens of all instances that we want, or have yet to see the end of. Those of known replicas are not made again.

        Every other instance with our tag is an orphan.
        """
        last, self._tokens = self._tokens, {}
        for row in rows:
            key = row.name, row.incarnation
            before = last.get(key, {})
            self._tokens[key] = {
                one.id: before.get(one.id) or token_of(self._owner, *key, one.id, one.offer)
                for one in row.attempts
            }
        return frozenset().union(*(tokens.values() for tokens in self._tokens.values()))
