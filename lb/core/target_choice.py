"""Choosing among the targets of a table, by the routing policies in use. Pure. See `targets`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from lb.config.options import PushMode
from lb.config.schema import Table
from lb.core.active_policies import UNUSED_S, ActivePolicies
from lb.core.target_state import Booking, Health, TargetState
from lb.core.target_status import TargetStatus
from policies.routing.base import Choice, RequestView, RoutingPolicy, TargetView

FADED_EACH_TIME = 16
FADE_EVERY_S = 0.1


class TargetChoice(TargetStatus):
    """The targets of a table and the policies that choose among them."""

    def __init__(self, table: Table, now: float, make_policy: Callable[[str], RoutingPolicy]) -> None:
        super().__init__(table)
        self._active_policies = ActivePolicies(table.policy, make_policy)
        self._troubled: set[TargetState] = set()
        self._fade_at = now
        self._relieved: dict[str, None] = {}  # a dict, since it must be the same in every run

    def use(self, policy: str) -> None:
        """Get ready for requests that name `policy`. Raises UnknownPolicyError."""
        self._active_policies.named(policy, self._open)

    def drop_unused_policies(self, now: float) -> None:
        """Forget policies that requests once named."""
        self._active_policies.drop_unused(now, UNUSED_S if self.table.access.overrides else 0.0)

    @property
    def needs_prompt(self) -> bool:
        """Whether any of the policies in use wants to see prompts."""
        return self._active_policies.needs_prompt

    def gauges(self) -> Mapping[str, float]:
        """Return the routing policy's own: how large its tree is, and the like."""
        return self._active_policies.own.gauges()

    def choose(
        self, request: RequestView, now: float, exclude: Collection[int] = (), policy: str | None = None
    ) -> Choice | None:
        """Return the choice among those who may take it now, without the epochs in `exclude`; None if there are none.

        A policy that waits chooses among all of the best health, and marks if the request is to wait for the target.

        `policy` chooses instead of the table's own. Raises UnknownPolicyError. Changes nothing.
        """
        chooser = self._policy_named(policy)
        if policy is not None:
            self._active_policies.used(policy, now)
        may_wait = self.table.pushing.mode is PushMode.WORK and chooser.waits
        if may_wait:
            views = self._ungated(exclude, now)
        else:
            views = self._candidates.without(exclude, now)[1] if exclude else self._candidates.views(now)
        if not views:
            return None
        if self._troubled:
            self._fade(now)
        choice = chooser.choose(request, views, now)
        if (
            choice is not None
            and choice.wait
            and not (may_wait and not self._entries[choice.target_id].admits())
        ):
            return choice._replace(wait=False)
        return choice

    def choose_only(
        self, request: RequestView, target_id: str, now: float, policy: str | None = None
    ) -> Choice | None:
        """Return the choice of that one target, for a request that has waited for it."""
        entry = self._entries.get(target_id)
        return self._policy_named(policy).choose(request, [entry.view], now) if entry is not None else None

    def waits(self, policy: str | None = None) -> bool:
        """Return whether requests of that policy wait for a target of their own, and not for any that has room."""
        return self.table.pushing.mode is PushMode.WORK and self._policy_named(policy).waits

    def offered(self, target_id: str, now: float) -> bool:
        """Return whether the target is of the best health there is."""
        entry = self._entries.get(target_id)
        if entry is None:
            return False
        return entry.health(now).is_good or entry.view in self._candidates.best(now)

    def ready(self, target_id: str, now: float, policy: str | None = None) -> bool:
        """Return whether a target of the table could take work now: its engine has nothing pending, or little to do before it."""
        entry = self._entries[target_id]
        return entry.admits() or (self.waits(policy) and self._policy_named(policy).ready(entry.view, now))

    def takes_another(self, booking: Booking, now: float, over: bool) -> bool:
        """Return whether the booking's target is healthy and takes one more request, this one being `over` or not."""
        entry = booking.entry
        if not entry.health(now).is_good:
            return False
        return entry.view.in_flight - over < entry.gate.cap or self.ready(entry.key.id, now)

    def has_room_outside(self, target_ids: Collection[str], now: float) -> bool:
        """Return whether a target of the best health that is not one of those has nothing pending, and may soon run dry.

        Where those are the targets for which requests wait, having no room, the first that is looked at decides.
        """
        return any(view.id not in target_ids for view in self._candidates.views(now))

    @property
    def health_changes(self) -> int:
        """Changes when the health of a target does, and when one joins or leaves."""
        return self._candidates.health_changes

    def take_relieved(self) -> Collection[str]:
        """Return the targets that may be able to take more than when this was last called; time aside."""
        relieved, self._relieved = self._relieved, {}
        return relieved

    def relieve(self, target_ids: Iterable[str]) -> None:
        """Targets of `take_relieved` that have not been looked at."""
        self._relieved.update(dict.fromkeys(target_ids))

    def queued(self, request: RequestView, choice: Choice, now: float, policy: str | None = None) -> None:
        """The request waits for the target of `choice`."""
        self._policy_named(policy).queued(request, choice, now)

    def dequeued(self, request: RequestView, policy: str | None = None) -> None:
        """The request waits no longer."""
        self._policy_named(policy).dequeued(request)

    def candidates(self, now: float, exclude: Collection[int] = ()) -> tuple[Health, Sequence[TargetView]]:
        """Return the best health of any target without the epochs in `exclude`, and who of that health admits."""
        self._fade(now)
        return self._candidates.without(exclude, now)

    def admits(self, now: float, exclude: Collection[int] = ()) -> bool:
        """Return whether `choose` would choose."""
        return bool(self._candidates.without(exclude, now)[1] if exclude else self._candidates.views(now))

    def has_candidate(self, now: float, exclude: Collection[int] = ()) -> bool:
        """Return whether a target could take it, now or once it has room."""
        if exclude:
            return self._candidates.without(exclude, now)[0] is not Health.CLOSED
        return bool(self._candidates.best(now))

    def room(self, now: float) -> bool:
        """Return whether any target, of any health, admits one more request."""
        return self._candidates.room(now)

    def version(self, now: float) -> int:
        """Revision; changes whenever a target becomes eligible."""
        return self._candidates.version(now)

    def views(self, now: float) -> list[TargetView]:
        """Every target of the table as a policy would see it; to be read only."""
        self._candidates.views(now)  # looks that have gone stale are forgotten
        self._fade(now)
        return [entry.view for entry in self._entries.values()]

    def _policy_named(self, policy: str | None) -> RoutingPolicy:
        return (
            self._active_policies.own if policy is None else self._active_policies.named(policy, self._open)
        )

    def _ungated(self, exclude: Collection[int], now: float) -> Sequence[TargetView]:
        if exclude:
            return self._candidates.without(exclude, now, gated=False)[1]
        return self._candidates.best(now)

    def _fade(self, now: float) -> None:
        """Where many have failed, a tenth of a second is soon enough for the next time."""
        if len(self._troubled) > FADED_EACH_TIME and now < self._fade_at:
            return
        self._fade_at = now + FADE_EVERY_S
        for entry in list(self._troubled):
            entry.view.trouble = entry.trouble_now(now)
            if not entry.view.trouble:
                self._troubled.discard(entry)
