"""New keys: secrets stay readable, digests stay what they were, and machines that run can be given new ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet, InvalidToken

from policies.model import CapacityType, Memory, Offer, Replica, ReplicaState, Zone
from skyserve_cli.controller.backup import key_rotation
from skyserve_cli.controller.backup.key_rotation import rotate
from skyserve_cli.controller.persistence import key_fingerprints as fingerprints
from skyserve_cli.controller.persistence.opening import opened
from skyserve_cli.controller.secret_box import SecretBox, seal_of
from skyserve_cli.home import Home
from skyserve_cli.state.store import Store

NOW = 1_800_000_000.0
SECRETS = {"TOKEN": "hunter2"}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home.from_environment({"SKYSERVE_HOME": str(tmp_path / "home")})
    home.create()
    return home


@pytest.fixture
def store(home: Home) -> Any:
    store = opened(home)
    put(store, "chat", seal_of(home).close(SECRETS))
    yield store
    store.close()


def put(store: Store, name: str, sealed: bytes) -> None:
    store.put_service(
        name, {}, replica_hash="h", sealed_secrets=sealed, lb_port=1, target=0, mode=None, now=NOW
    )


def run_on(store: Store, cloud: str) -> None:
    offer = Offer(Zone(cloud, "r", "z"), "m", None, 0.0, CapacityType.SPOT, 1.0)
    replica = Replica(3, 1, offer, ReplicaState.READY, NOW, NOW, "i-3")
    store.commit("chat", now=NOW, changed=[replica], memory=Memory(4), target=1, notes="", records=[])


def keys(home: Home) -> tuple[str, bytes, bytes]:
    return home.token(), home.sealing_keys()[0], home.machine_secret()


def test_everything_is_new_and_secrets_and_digests_are_as_before(home: Home, store: Store) -> None:
    before, digest = keys(home), seal_of(home).digest(SECRETS)
    for _ in range(2):
        rotated = rotate(home, store)
        assert (rotated.resealed, list(rotated.unopened), list(rotated.machines)) == (1, [], [])
    assert not set(keys(home)) & set(before)
    assert len(home.sealing_keys()) == 1
    sealed = store.version("chat", 1).sealed_secrets
    assert seal_of(home).open(sealed) == SECRETS
    with pytest.raises(InvalidToken):
        Fernet(before[1]).decrypt(sealed)
    assert seal_of(home).digest(SECRETS) == digest
    assert {path.stat().st_mode & 0o777 for path in home.root.glob("*.key")} == {0o600}


@pytest.mark.parametrize(
    ("cloud", "stays"),
    [pytest.param("aws", True, id="rented"), pytest.param("ssh", True, id="our own host"), pytest.param("local", False, id="here")],
)  # fmt: skip
def test_the_older_keys_of_machines_stay_while_some_run(
    home: Home, store: Store, cloud: str, stays: bool
) -> None:
    run_on(store, cloud)
    first = home.machine_secret()
    for count in (2, 3):
        rotated = rotate(home, store)
        assert list(rotated.machines) == (["chat/3"] if stays else [])
        assert len(set(home.machine_secrets())) == (count if stays else 1)
        assert home.machine_secrets()[0] != first
        assert (home.machine_secret() == first) is stays  # what certificates follow from
        fingerprints.check(store, home)
    store.set_down("chat", purge=True, now=NOW)
    store.commit("chat", now=NOW, changed=[gone()], memory=Memory(4), target=0, notes="", records=[])
    rotate(home, store)
    assert len(home.machine_secrets()) == 1


def gone() -> Replica:
    offer = Offer(Zone("aws", "r", "z"), "m", None, 0.0, CapacityType.SPOT, 1.0)
    return Replica(3, 1, offer, ReplicaState.GONE, NOW, NOW, "i-3")


def test_secrets_that_no_key_opens_are_named_and_left(home: Home, store: Store) -> None:
    foreign = SecretBox(Fernet.generate_key()).close(SECRETS)
    put(store, "other", foreign)
    rotated = rotate(home, store)
    assert (rotated.resealed, list(rotated.unopened)) == (1, [("other", 1)])
    assert store.version("other", 1).sealed_secrets == foreign


class PowerCut(Exception):
    pass


def test_a_rotation_that_is_interrupted_leaves_secrets_readable_and_is_completed(
    home: Home, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = home.machine_secret()
    fingerprints.record(store, home)

    def cut(*_: object) -> None:
        raise PowerCut

    with monkeypatch.context() as patched:
        patched.setattr(store, "reseal", cut)
        with pytest.raises(PowerCut):
            rotate(home, store)
    assert len(home.sealing_keys()) == 2
    assert seal_of(home).open(store.version("chat", 1).sealed_secrets) == SECRETS
    assert home.machine_secret() == before
    fingerprints.check(store, home)
    rotate(home, store)
    assert (len(home.sealing_keys()), len(home.machine_secrets())) == (1, 1)
    assert seal_of(home).open(store.version("chat", 1).sealed_secrets) == SECRETS
    fingerprints.check(store, home)


@pytest.mark.parametrize("nth", range(1, 6))
def test_a_rotation_that_is_killed_between_two_files_leaves_a_home_that_starts(
    home: Home, store: Store, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Another home with the old keys is refused once secrets are sealed with the new one: none of them opens a secret."""
    home.machine_secret()
    other = Home.from_environment({"SKYSERVE_HOME": str(home.root.with_name("other"))})
    other.create()
    for path, copy in zip(home.key_files(), other.key_files(), strict=True):
        copy.write_bytes(path.read_bytes())
    fingerprints.record(store, home)
    fingerprints.check(store, other)
    real, written = key_rotation.write_private, []

    def write(path: Path, content: bytes) -> None:
        written.append(path)
        if len(written) == nth:
            raise PowerCut
        real(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(key_rotation, "write_private", write)
        with pytest.raises(PowerCut):
            rotate(home, store)
    fingerprints.check(store, home)
    assert seal_of(home).open(store.version("chat", 1).sealed_secrets) == SECRETS
    if nth < 4:  # nothing is sealed with the new key
        fingerprints.check(store, other)
        return
    with pytest.raises(fingerprints.ForeignKeysError, match=r"sealing\.key is not the key"):
        fingerprints.check(store, other)
    rotate(home, store)
    fingerprints.check(store, home)
