"""The tables. `migrations/` brings a database to exactly this shape; a test compares the two."""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

#: One row, made once: who we are to the clouds. Instances are tagged with `owner`.
identity = sa.Table(
    "identity",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("owner", sa.String(32), nullable=False),
)

#: One row: how often anything was written that `Store.services` shows. A reader that has read it at this count need not
#: read again.
changes = sa.Table(
    "changes",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("count", sa.Integer, nullable=False),
)

#: One row: which controller may write (`state.lease`).
lease = sa.Table(
    "lease",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("holder", sa.String(64), nullable=False),
    # For people: host, process and home of the holder.
    sa.Column("about", sa.Text, nullable=False),
    # Grows with every term of a controller, and never falls.
    sa.Column("epoch", sa.BigInteger, nullable=False),
    # Grows by one with every renewal of a term.
    sa.Column("renewals", sa.BigInteger, nullable=False),
    # By the database's clock.
    sa.Column("expires_at", sa.Float, nullable=False),
)

#: Of each key in the home that this database depends on: a digest, so that a home with other keys is recognised.
fingerprints = sa.Table(
    "fingerprints",
    metadata,
    sa.Column("key", sa.String(32), primary_key=True),
    sa.Column("value", sa.String(64), nullable=False),
)

services = sa.Table(
    "services",
    metadata,
    sa.Column("name", sa.String(63), primary_key=True),
    # Drawn again at every `up` of a name that is down: part of the launch tokens.
    sa.Column("incarnation", sa.String(16), nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("update_mode", sa.String(16), nullable=False),
    sa.Column("down", sa.Boolean, nullable=False),
    sa.Column("purge", sa.Boolean, nullable=False),
    # How many the load needs, and how many should serve so that they are there.
    sa.Column("wanted", sa.Integer, nullable=False, server_default="0"),
    sa.Column("target", sa.Integer, nullable=False),
    sa.Column("notes", sa.Text, nullable=False),
    sa.Column("next_replica_id", sa.Integer, nullable=False),
    sa.Column("memory", sa.JSON, nullable=False),
    sa.Column("lb_port", sa.Integer, nullable=False),
    # What replicas whose rows were folded away have cost (see Store.fold).
    sa.Column("folded_usd", sa.Float, nullable=False),
    sa.Column("folded_on_demand_usd", sa.Float, nullable=False),
    # Whose quota it uses; "": no team's.
    sa.Column("team", sa.String(63), nullable=False, server_default=""),
)

versions = sa.Table(
    "versions",
    metadata,
    sa.Column("service", sa.String(63), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("replica_hash", sa.String(64), nullable=False),
    sa.Column("spec", sa.JSON, nullable=False),
    sa.Column("sealed_secrets", sa.LargeBinary, nullable=False),
)

replicas = sa.Table(
    "replicas",
    metadata,
    sa.Column("service", sa.String(63), primary_key=True),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("since", sa.Float, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("cloud", sa.String(32), nullable=False),
    sa.Column("region", sa.String(64), nullable=False),
    sa.Column("zone", sa.String(64), nullable=False),
    sa.Column("instance_type", sa.String(64), nullable=False),
    sa.Column("accelerator", sa.String(64)),
    sa.Column("accelerator_count", sa.Float, nullable=False),
    sa.Column("capacity_type", sa.String(16), nullable=False),
    sa.Column("price_usd_hour", sa.Float, nullable=False),
    sa.Column("on_demand_usd_hour", sa.Float),
    # Which alternative of the version's `resources` it was launched for.
    sa.Column("choice", sa.Integer, nullable=False, server_default="0"),
    sa.Column("instance_id", sa.String(255)),
    sa.Column("endpoint", sa.String(255)),
    sa.Column("launched_at", sa.Float),
    sa.Column("ready_at", sa.Float),
    sa.Column("drain_by", sa.Float),
    sa.Column("preempt_at", sa.Float),
    sa.Column("retire_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("end_reason", sa.String(16)),
    sa.Column("role", sa.String(16), nullable=False, server_default="replica"),
    sa.Column("message", sa.Text, nullable=False),
    sa.Index("ix_replicas_state", "state"),
)

#: Replicas the user terminated by id: a goal, written by the API, acted on by the reconciler.
kills = sa.Table(
    "kills",
    metadata,
    sa.Column("service", sa.String(63), primary_key=True),
    sa.Column("replica_id", sa.Integer, primary_key=True),
)

#: What services were asked for. A row is about `span` minutes from `minute` on (minutes since 1970): 1, or 10 where it is the
#: mean of ten minutes that are longer ago (see `state.demand`).
demand = sa.Table(
    "demand",
    metadata,
    sa.Column("service", sa.String(63), primary_key=True),
    sa.Column("span", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("minute", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("requests", sa.Float, nullable=False),
    sa.Column("prompt_tokens", sa.Float, nullable=False),
    sa.Column("response_tokens", sa.Float, nullable=False),
    sa.Column("late", sa.Float, nullable=False),
    # Ready replicas, as the load balancers knew them.
    sa.Column("ready", sa.Float, nullable=False),
    sqlite_with_rowid=False,
)

#: What the load balancers of a service have counted in the `span` seconds from `at` on (UNIX seconds), packed (`state.samples`).
series = sa.Table(
    "series",
    metadata,
    sa.Column("service", sa.String(63), primary_key=True),
    sa.Column("span", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("at", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("samples", sa.LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)

#: What the requests of each API key and model have used on a day (from 1970-01-01, UTC), as one source counted it (`state.usage`).
usage = sa.Table(
    "usage",
    metadata,
    sa.Column("service", sa.String(63), primary_key=True),
    sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
    # The name of the key's owner; "": no key was needed.
    sa.Column("key", sa.String(512), primary_key=True),
    sa.Column("model", sa.String(512), primary_key=True),
    sa.Column("source", sa.String(63), primary_key=True),
    sa.Column("requests", sa.BigInteger, nullable=False),
    sa.Column("tokens_in", sa.BigInteger, nullable=False),
    sa.Column("tokens_out", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

#: The event log: append-only, what happened and what was decided, in order. `state` is the state from then on: the
#: state of the replica, or (kind "scale") how many replicas are wanted.
events = sa.Table(
    "events",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("service", sa.String(63), nullable=False),
    sa.Column("replica_id", sa.Integer),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("state", sa.String(16)),
    sa.Column("message", sa.Text, nullable=False),
    # Who set the goal (kind "goal"): the name of a token, or "owner".
    sa.Column("author", sa.String(63), nullable=False, server_default=""),
    sa.Index("ix_events_service_seq", "service", "seq"),
)

#: Who may call the controller's API beside its owner (`state.team`).
tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("name", sa.String(63), primary_key=True),
    # SHA-256 of the token, as hexadecimal digits.
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("role", sa.String(16), nullable=False),
    # The names of services that it covers; NULL: all.
    sa.Column("services", sa.JSON(none_as_null=True)),
    # The team of the services that its holder starts; "": none.
    sa.Column("team", sa.String(63), nullable=False, server_default=""),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("created_by", sa.String(63), nullable=False),
    sa.Column("revoked_at", sa.Float),
    sa.Index("ix_tokens_digest", "digest", unique=True),
)

#: Notifications that a destination has not received yet, in order. `message` is the sent message (`controller.notify.message`); no
#: address and no secret is stored.
outbox = sa.Table(
    "outbox",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("destination", sa.String(31), nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    # Deliveries that failed.
    sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
    sa.Column("message", sa.JSON, nullable=False),
    sa.Index("ix_outbox_destination", "destination", "attempts", "seq"),
)

#: What the controller last decided about each kind of notification of each service (`controller.notify.alarms`).
alarms = sa.Table(
    "alarms",
    metadata,
    sa.Column("service", sa.String(63), primary_key=True),
    sa.Column("kind", sa.String(32), primary_key=True),
    # Since when it is the case; NULL: it is not.
    sa.Column("since", sa.Float),
    sa.Column("notified_at", sa.Float),
    # Whether the last notification said that it is the case.
    sa.Column("announced", sa.Boolean, nullable=False),
)
