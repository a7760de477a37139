"""New keys for a home without a running controller.

All keys can be replaced while machines run. `machines.key` then has the new secret and the older ones. The controller logs in
with keys that follow from the newest, and where a machine does not know these, with older ones once, to give it the new ones
(`provisioners.remote.first_login`): nothing that runs there is interrupted, and no older key opens the machine afterwards. The oldest
secret stays the one that certificates of machines and tokens of load balancer agents follow from, because running machines have these
from when they were launched. The older secrets are removed by a rotation while no machine runs.

A process that is killed in the middle leaves a home that works: each file has the new key and the old ones
until all secrets are sealed with the new one. Rotating again completes it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.fernet import Fernet

from skyserve_cli.controller.persistence import key_fingerprints as fingerprints
from skyserve_cli.controller.secret_box import CannotUnsealError, SecretBox
from skyserve_cli.home import MACHINE_SECRET_BYTES, Home, new_token, write_private
from skyserve_cli.state.database import replace_fingerprints
from skyserve_cli.state.store import Store

_WITHOUT_KEYS = "local"  # this machine, on which there is no login


@dataclass(frozen=True, slots=True)
class Rotated:
    """`resealed` counts versions; `unopened` are those whose secrets no key opens; `machines` are to get new keys."""

    resealed: int
    unopened: Sequence[tuple[str, int]]
    machines: Sequence[str]


def rotate(home: Home, store: Store) -> Rotated:
    """Replace what can be replaced now. The caller holds the controller's lock."""
    old = home.sealing_keys()
    if home.digest_key() is None:
        write_private(home.digest_key_file, old[0])
    new = Fernet.generate_key()
    machines = living_machines(store)
    machine_secret = secrets.token_bytes(MACHINE_SECRET_BYTES)
    write_private(home.machine_secret_file, b"".join((machine_secret, *home.machine_secrets())))
    write_private(home.sealing_key_file, b"\n".join((new, *old)))
    seal = SecretBox(new, *old)

    def again(sealed: bytes) -> bytes | None:
        try:
            return seal.again(sealed)
        except CannotUnsealError:
            return None

    # With the secrets, or another controller of the database could go on with a key that opens none of them.
    known = {name: digests[0] for name, digests in fingerprints.of_files(home).items()}
    resealed, unopened = store.reseal(again, lambda c: replace_fingerprints(c, known))
    if not machines:
        write_private(home.machine_secret_file, machine_secret)
    write_private(home.sealing_key_file, new)
    fingerprints.record(store, home)
    write_private(home.token_file, new_token())
    if home.metrics_token_file.exists():
        write_private(home.metrics_token_file, new_token())
    return Rotated(resealed, unopened, machines)


def living_machines(store: Store) -> list[str]:
    """Return the replicas and agents whose machines have keys that follow from machines.key."""
    return [
        f"{row.name}/{one.id}"
        for row in store.services()
        for one in row.attempts
        if one.zone.cloud != _WITHOUT_KEYS
    ]
