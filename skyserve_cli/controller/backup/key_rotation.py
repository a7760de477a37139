"""New keys for a home without a running controller.

The API's token and the sealing key can always be replaced. All SSH keys of machines follow from `machines.key`, so it can be
replaced only while no rented machine runs: afterwards it would not be possible to log in on one.

A process that is killed in the middle leaves a home that works: the file of sealing keys has the new key and the old ones
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
    """`resealed` counts versions; `unopened` are those whose secrets no key opens; `machines` keep machines.key as it is."""

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
    machine_secret = home.machine_secret() if machines else secrets.token_bytes(MACHINE_SECRET_BYTES)
    write_private(home.sealing_key_file, b"\n".join((new, *old)))
    seal = SecretBox(new, *old)

    def again(sealed: bytes) -> bytes | None:
        try:
            return seal.again(sealed)
        except CannotUnsealError:
            return None

    # With the secrets, or another controller of the database could go on with a key that opens none of them. The key of machines is
    # not known until its file is written: a process that is killed in between leaves no home that is refused.
    stay = {path.name for path in home.key_files() if machines or path != home.machine_secret_file}
    known = {name: digests[0] for name, digests in fingerprints.of_files(home).items() if name in stay}
    resealed, unopened = store.reseal(again, lambda c: replace_fingerprints(c, known))
    write_private(home.machine_secret_file, machine_secret)
    write_private(home.sealing_key_file, new)
    fingerprints.record(store, home)
    write_private(home.token_file, new_token())
    if home.metrics_token_file.exists():
        write_private(home.metrics_token_file, new_token())
    return Rotated(resealed, unopened, machines)


def living_machines(store: Store) -> list[str]:
    """Return the replicas and agents whose machines were made with the present machines.key."""
    return [
        f"{row.name}/{one.id}"
        for row in store.services()
        for one in row.attempts
        if one.zone.cloud != _WITHOUT_KEYS
    ]
