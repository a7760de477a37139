"""Which alternative of `resources` a replica was launched for.

Until this revision it was not stored: the order of a launch was built with the alternative that `_launched_for` finds,
whether or not that was the one which the offer had been made for. So for a row of before, the same inference on the same
values is not a guess: it is what the machine got, its image, disk and labels. It is made here once for the rows that
live, whose orders may be sent again, and nowhere else. Rows of terminated replicas keep 0: no order is built from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

from provisioners.port.accelerator_names import canonical

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_LIVE = sa.text(
    "SELECT r.service, r.id, r.cloud, r.region, r.zone, r.instance_type, r.accelerator, r.accelerator_count,"
    " r.capacity_type, v.spec FROM replicas r JOIN versions v ON v.service = r.service AND v.version = r.version"
    " WHERE r.state != 'GONE' AND r.role = 'replica'"
)
_SET = sa.text("UPDATE replicas SET choice = :choice WHERE service = :service AND id = :id")
_SAME_COUNT = 0.005


def upgrade() -> None:
    op.add_column("replicas", sa.Column("choice", sa.Integer(), nullable=False, server_default="0"))
    connection = op.get_bind()
    for row in connection.execute(_LIVE).mappings().all():
        spec = json.loads(row["spec"]) if isinstance(row["spec"], str) else row["spec"]
        choice = _launched_for(spec.get("resources") or [], dict(row))
        if choice:
            connection.execute(_SET, {"choice": choice, "service": row["service"], "id": row["id"]})


def downgrade() -> None:
    op.drop_column("replicas", "choice")


def _launched_for(resources: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> int:
    """Return the index of the alternative whose order was sent.

    The first that fits as far as the row shows it, those of its capacity type and zone before others.
    """
    fitting = [index for index, one in enumerate(resources) if _fits(one, row)]
    is_spot = row["capacity_type"] == "spot"

    def strangeness(index: int) -> tuple[bool, bool]:
        one = resources[index]
        return bool(one.get("use_spot")) != is_spot, one.get("zone") not in (None, row["zone"])

    return min(fitting or range(len(resources)), key=strangeness, default=0)


def _fits(one: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    if one.get("cloud") not in (None, row["cloud"]):
        return False
    if one.get("region") is not None and one["region"].lower() != row["region"].lower():
        return False
    images = {place for place, _ in one.get("images") or ()}
    if images and not images & {row["region"], row["cloud"], "*"}:
        return False
    instance_type = one.get("instance_type")
    if instance_type is not None:
        launched = row["instance_type"].lower()
        if instance_type.lower() not in (launched, launched.partition("+")[0]):
            return False
    if one.get("accelerator") is None:
        return instance_type is not None or row["accelerator"] is None
    if row["accelerator"] is None or canonical(one["accelerator"]) != canonical(row["accelerator"]):
        return False
    return bool(abs(one.get("accelerator_count", 0.0) - row["accelerator_count"]) < _SAME_COUNT)
