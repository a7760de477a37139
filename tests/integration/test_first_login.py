"""Machines without user data: real sshds with the host keys of their images, prepared over the first connection."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from provisioners.port.commands import HostKeyError, Login, LoginRefusedError, ShellError, UnreachableError
from provisioners.port.vm import Machine
from provisioners.remote.first_login import FirstLogins, host_key_of
from provisioners.remote.ssh import Shell, connect
from provisioners.remote.ssh_keys import (
    SshKey,
    lasting_keys_script,
    own_login_script,
    user_data,
)
from tests.clouds.vms import vm_world
from tests.clouds.vms.vm_bench import KEYS, boot, launch_order, login, machine_of, machine_order, until
from tests.clouds.vms.vm_world import Vm, VmWorld

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(vm_world.why_not() is not None, reason=str(vm_world.why_not())),
]


@pytest.fixture(scope="module")
def world() -> Iterator[VmWorld]:
    with VmWorld() as one:
        yield one


def bare(world: VmWorld, name: str) -> Vm:
    """As a cloud without user data makes it: our key lets root in, and the host key is the image's."""
    return world.boot(name, logins={"root": KEYS.login("chat").public})


def first_logins(vm: Vm, folder: Path | None = None) -> FirstLogins:
    def script(machine: Machine) -> str:
        return user_data(machine_order(machine.token), KEYS.host(machine.token))

    return FirstLogins("root", lambda machine: login(vm), script, folder)


def prepared(logins: FirstLogins, machine: Machine) -> bool:
    try:
        logins.prepare(machine)
    except (UnreachableError, LoginRefusedError, HostKeyError):
        return False
    return True


def test_a_bare_machine_is_prepared_once_and_has_our_key_from_then_on(world: VmWorld, tmp_path: Path) -> None:
    vm = bare(world, "bare-1")
    machine = machine_of(vm, launch_order("bare-1"))
    until(lambda: prepared(first_logins(vm, tmp_path), machine))
    with connect(login(vm)) as shell:
        assert shell.run("id -un").out == b"skyserve\n"
    assert json.loads((tmp_path / "bare-1.json").read_text())["is_prepared"]
    first_logins(vm, tmp_path).prepare(machine)  # another controller
    logins = first_logins(vm)  # another home, which has the secret
    logins.prepare(machine)


def test_a_host_with_another_key_than_the_first_is_told_nothing(world: VmWorld, tmp_path: Path) -> None:
    true, other = bare(world, "bare-3"), bare(world, "bare-4")
    until(lambda: can_dial(true) and can_dial(other))
    key = host_key_of(login(true))
    (tmp_path / "bare-3.json").write_text(json.dumps({"host_key": key}))
    moved = replace(login(true), address=other.address)

    def script(machine: Machine) -> str:
        raise AssertionError("nothing may be sent")

    logins = FirstLogins("root", lambda machine: moved, script, tmp_path)
    with pytest.raises(HostKeyError, match="shows another host key than the one we know"):
        logins.prepare(machine_of(true, launch_order("bare-3")))


def test_what_was_prepared_is_never_told_anything_again(world: VmWorld, tmp_path: Path) -> None:
    vm = bare(world, "bare-5")
    (tmp_path / "bare-5.json").write_text(json.dumps({"is_prepared": True}))
    machine = machine_of(vm, launch_order("bare-5"))
    until(lambda: can_dial(vm))
    with pytest.raises(HostKeyError):
        first_logins(vm, tmp_path).prepare(machine)
    assert json.loads((tmp_path / "bare-5.json").read_text()) == {"is_prepared": True}


def test_a_machine_with_user_data_needs_none_of_it(world: VmWorld, tmp_path: Path) -> None:
    vm = boot(world, "usual-1")
    machine = machine_of(vm, launch_order("usual-1"))
    until(lambda: can_log_in(vm))
    logins = FirstLogins("root", lambda machine: login(vm), lambda machine: "exit 1", tmp_path)
    logins.prepare(machine)


def test_a_memory_that_cannot_be_read_is_an_error(world: VmWorld, tmp_path: Path) -> None:
    (tmp_path / "bare-6.json").write_text("{")
    vm = bare(world, "bare-6")
    with pytest.raises(ShellError, match="cannot be read"):
        first_logins(vm, tmp_path).prepare(machine_of(vm, launch_order("bare-6")))


# --- with user data -----------------------------------------------------------------------------------------------


def lasting(token: str, host_key: SshKey | None = None) -> str:
    return lasting_keys_script("skyserve", KEYS.login("chat"), host_key or KEYS.host(token))


def with_user_data(
    vm: Vm, folder: Path | None = None, dial: Callable[[Login], Shell] = connect
) -> FirstLogins:
    """As rented machines have it: the key of the user data, and then another one."""
    return FirstLogins(
        "skyserve",
        lambda machine: login(vm),
        lambda machine: lasting(machine.token),
        folder,
        boot_keys=lambda machine: [KEYS.boot_host(machine.token).public],
        own_script=lambda machine: own_login_script(KEYS.login("chat")),
        older=lambda machine: [owners(vm)],
        dial=dial,
    )


def owners(vm: Vm) -> Login:
    """As the controller logged in before each service had a key."""
    return replace(login(vm), private_key=KEYS.owner_login().private)


def booted(world: VmWorld, name: str) -> Vm:
    return world.boot(name, user_data=user_data(machine_order(name), KEYS.boot_host(name)))


def shown(vm: Vm) -> str:
    try:
        return host_key_of(login(vm)).split()[1]
    except UnreachableError:
        return ""


def key(public: str) -> str:
    return public.split()[1]


needs_sudo = pytest.mark.skipif(shutil.which("sudo") is None, reason="the machines' image has no sudo")


@needs_sudo
def test_the_host_key_of_user_data_is_replaced_and_never_accepted_again(
    world: VmWorld, tmp_path: Path
) -> None:
    vm = booted(world, "two-keys-1")
    machine = machine_of(vm, launch_order("two-keys-1"))
    until(lambda: shown(vm) == key(KEYS.boot_host("two-keys-1").public))
    until(lambda: has_other_key(vm))
    until(lambda: prepared(with_user_data(vm, tmp_path), machine))
    until(lambda: can_log_in(vm))

    vm.run("/run/user-data")  # as some clouds do at every boot
    until(lambda: shown(vm) == key(KEYS.host("two-keys-1").public))
    until(lambda: prepared(with_user_data(vm), machine))  # a home that has forgotten finds out again

    # An attacker who has read the user data can pose as the machine that was. It is not trusted any longer.
    back = KEYS.boot_host("two-keys-1")
    vm.run(lasting("", back))
    until(lambda: shown(vm) == key(back.public))
    with_user_data(vm, tmp_path).prepare(machine)
    until(lambda: has_other_key(vm))


@needs_sudo
@pytest.mark.parametrize("nth", [1, 2])
def test_a_change_of_keys_that_is_cut_short_is_made_again(world: VmWorld, tmp_path: Path, nth: int) -> None:
    """The controller crashes at each of its logins: the first one, and the one that verifies."""
    name = f"cut-short-{nth}"
    vm = booted(world, name)
    machine = machine_of(vm, launch_order(name))
    until(lambda: shown(vm) == key(KEYS.boot_host(name).public))
    dialled: list[Login] = []

    def dial(one: Login) -> Shell:
        dialled.append(one)
        if len(dialled) == nth:
            raise KeyboardInterrupt
        return connect(one)

    def is_killed() -> bool:
        """Return False while sshd is starting again with the key of the user data: nothing has been run by then."""
        dialled.clear()
        try:
            with_user_data(vm, tmp_path, dial).prepare(machine)
        except UnreachableError:
            return False
        except KeyboardInterrupt:
            return True
        raise AssertionError(f"prepared with {len(dialled)} connections")

    until(is_killed)
    until(lambda: prepared(with_user_data(vm, tmp_path), machine))
    until(lambda: can_log_in(vm))  # sshd may still be starting again


def test_an_image_without_sudo_keeps_the_key_of_its_user_data(world: VmWorld, tmp_path: Path) -> None:
    vm = booted(world, "no-sudo-1")
    vm.run(
        "rm -f $(command -v sudo)",
        check=False,
    )
    machine = machine_of(vm, launch_order("no-sudo-1"))
    logins = with_user_data(vm, tmp_path)
    until(lambda: prepared(logins, machine))
    for one in (logins, with_user_data(vm, tmp_path)):
        assert key(one.login(machine).host_keys[0]) == key(KEYS.boot_host("no-sudo-1").public)
        connect(one.login(machine)).close()
    logins.forget("no-sudo-1")
    assert logins.login(machine) == login(vm)


# --- with keys of before ------------------------------------------------------------------------------------------


def of_version_0_2(world: VmWorld, name: str, *, is_prepared: bool = True) -> Vm:
    """A machine that lets the owner's key in; its cloud gave that key to the image's own user, too."""
    order = replace(machine_order(name), public_key=KEYS.owner_login().public)
    host_key = KEYS.host(name) if is_prepared else KEYS.boot_host(name)
    vm = world.boot(name, user_data=user_data(order, host_key), logins={"ubuntu": KEYS.owner_login().public})
    until(lambda: shown(vm) == key(host_key.public))
    return vm


def lets_in(vm: Vm, private_key: str, user: str = "skyserve") -> bool:
    def attempt() -> bool | None:
        try:
            connect(replace(login(vm), private_key=private_key, user=user)).close()
        except LoginRefusedError:
            return False
        except UnreachableError:  # sshd starts again
            return None
        return True

    return until(lambda: (attempt(),) if attempt() is not None else None)[0] is True


@needs_sudo
def test_a_machine_of_an_earlier_version_gets_the_key_of_its_service_and_loses_the_owners(
    world: VmWorld, tmp_path: Path
) -> None:
    vm = of_version_0_2(world, "older-1")
    machine = machine_of(vm, launch_order("older-1"))
    (tmp_path / "older-1.json").write_text(json.dumps({"is_prepared": True}))
    assert lets_in(vm, KEYS.owner_login().private, "ubuntu")
    until(lambda: prepared(with_user_data(vm, tmp_path), machine))
    vm.run("/run/user-data; sleep 0.5")  # as some clouds do at every boot
    assert lets_in(vm, KEYS.login("chat").private)
    for private_key in (KEYS.owner_login().private, KEYS.login("other").private):
        assert not lets_in(vm, private_key)
        assert not lets_in(vm, private_key, "ubuntu")
    with_user_data(vm).prepare(machine)  # a home that has forgotten finds out again


@needs_sudo
def test_an_exchange_of_keys_that_is_cut_at_any_line_is_completed(world: VmWorld, tmp_path: Path) -> None:
    vm = of_version_0_2(world, "older-2", is_prepared=False)
    machine = machine_of(vm, launch_order("older-2"))
    lines = lasting("older-2").splitlines(keepends=True)
    cuts = [at for at, line in enumerate(lines) if at and not _in_here_document(lines, at)]
    for at in cuts[:: max(1, len(cuts) // 6)]:
        vm.run("".join(lines[:at]) + "\nkill -HUP $(cat /run/sshd.pid) 2>/dev/null || true", check=False)
    until(lambda: prepared(with_user_data(vm, tmp_path), machine))
    assert lets_in(vm, KEYS.login("chat").private)
    assert not lets_in(vm, KEYS.owner_login().private)


def _in_here_document(lines: list[str], at: int) -> bool:
    """Return whether a cut before this line would leave a document without its end, which a shell never runs."""
    text = "".join(lines[:at])
    return text.count("<<'E'") > text.count("\nE\n")


def test_an_image_without_sudo_loses_the_owners_key_too(world: VmWorld, tmp_path: Path) -> None:
    vm = of_version_0_2(world, "older-3", is_prepared=False)
    vm.run("rm -f $(command -v sudo)", check=False)
    machine = machine_of(vm, launch_order("older-3"))
    (tmp_path / "older-3.json").write_text(json.dumps({"keeps": True}))
    logins = with_user_data(vm, tmp_path)
    until(lambda: prepared(logins, machine))
    vm.run("/run/user-data; sleep 0.5")
    until(lambda: can_dial(vm))
    connect(logins.login(machine)).close()
    with pytest.raises(LoginRefusedError):
        connect(replace(logins.login(machine), private_key=KEYS.owner_login().private))


def can_dial(vm: Vm) -> bool:
    try:
        return bool(host_key_of(login(vm)))
    except UnreachableError:
        return False


def has_other_key(vm: Vm) -> bool:
    """Return False while sshd starts again; log in with another key than the machine shows, and this fails."""
    try:
        connect(login(vm)).close()
    except HostKeyError:
        return True
    except UnreachableError:
        return False
    raise AssertionError("this key is still accepted")


def can_log_in(vm: Vm) -> bool:
    try:
        connect(login(vm)).close()
    except ShellError:
        return False
    return True
