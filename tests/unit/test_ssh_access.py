"""How config.yaml describes access to hosts over SSH: what is understood, errors, and the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies.model import CapacityType, Zone
from provisioners.assembly import login_of
from provisioners.port.vm import Machine, MachineState
from provisioners.remote.ssh_config import SshAccess, SshRoute, access_of, program_of, way_of
from provisioners.remote.ssh_keys import Keys
from skyserve_cli.config import ConfigError, load_config

KEYS = Keys(bytes(32), "me")
PUBLIC = " ".join(KEYS.host("t").public.split()[:2])
OTHER = " ".join(KEYS.host("u").public.split()[:2])
BASE = {"user": "me", "identity_file": "/k", "known_hosts": "/known"}


def understood(**said: Any) -> SshAccess:
    complaints: list[str] = []
    access = access_of({**BASE, **said}, "h", complaints)
    assert complaints == []
    assert access is not None
    return access


@pytest.mark.parametrize(
    ("bastion", "at", "access"),
    [
        pytest.param("jump", "jump", {}, id="all as for the hosts"),
        pytest.param("ops@jump:2222", "jump", {"user": "ops", "port": 2222}, id="in one word"),
        pytest.param("[2001:db8::1]:23", "2001:db8::1", {"port": 23}, id="an address of IPv6"),
        pytest.param({"host": "jump", "host_key": OTHER}, "jump", {"host_key": OTHER}, id="a key of its own"),
        pytest.param(
            {"host": "jump", "identity_file": "/other"},
            "jump",
            {"identity_file": Path("/other")},
            id="another key",
        ),
        pytest.param({"host": "jump", "ssh_agent": True}, "jump", {"ssh_agent": True}, id="an agent"),
    ],
)
def test_a_bastion_has_what_it_does_not_say_from_the_hosts(
    bastion: Any, at: str, access: dict[str, Any]
) -> None:
    found = understood(port=24, host_key=PUBLIC, bastion=bastion)
    assert (found.port, found.host_key) == (24, PUBLIC)
    assert found.bastion is not None
    assert found.bastion == (at, replace(SshAccess("me", Path("/k"), Path("/known")), **access))


def test_a_passphrase_and_a_certificate_go_with_their_key_to_the_bastion() -> None:
    both = {"passphrase_file": "/p", "certificate_file": "/c"}
    same, other = (
        understood(bastion="jump", **both),
        understood(bastion={"host": "jump", "identity_file": "/other"}, **both),
    )
    assert same.bastion is not None
    assert other.bastion is not None
    assert (same.bastion[1].passphrase_file, same.bastion[1].certificate_file) == (Path("/p"), Path("/c"))
    assert (other.bastion[1].passphrase_file, other.bastion[1].certificate_file) == (None, None)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"user": None}, "h.user: is missing"),
        ({"identity_file": None}, "h.identity_file: is missing (or set ssh_agent: true)"),
        ({"certificate_file": 1}, "h.certificate_file: must be the path of a file"),
        ({"ssh_agent": "yes"}, "h.ssh_agent: must be true or false"),
        ({"port": 0}, "h.port: must be a number from 1 to 65535"),
        ({"host_key": "ssh-ed25519 AAAA"}, "h.host_key: must be a line like ssh-ed25519 AAAA…"),
        ({"host_key": "secret words"}, "h.host_key: must be a line like"),
        ({"bastion": "a b"}, "h.bastion: must be user@host:port, or a mapping with host"),
        ({"bastion": {"user": "x"}}, "h.bastion: must be user@host:port, or a mapping with host"),
        ({"bastion": {"host": "x", "bastion": "y"}}, "h.bastion.bastion: unknown key"),
        ({"bastion": {"host": "x", "port": "ssh"}}, "h.bastion.port: must be a number"),
        (
            {"bastion": "x", "proxy_command": "nc %h %p"},
            "h.bastion: proxy_command says how the host is reached",
        ),
        ({"proxy_command": "nc %h %q"}, "h.proxy_command: '%q' stands for nothing"),
        ({"proxy_command": "nc %i"}, "h.proxy_command: '%i' stands for nothing here: there are %h, %p, %r"),
        ({"proxy_command": "nc 'x"}, "h.proxy_command: cannot be read: No closing quotation"),
        ({"proxy_command": " "}, "h.proxy_command: must be a command"),
    ],
)
def test_what_is_wrong_is_said_by_its_key(said: dict[str, Any], sentence: str) -> None:
    complaints: list[str] = []
    values = {key: value for key, value in {**BASE, **said}.items() if value is not None}
    assert access_of(values, "h", complaints) is None
    assert sentence in "; ".join(complaints)


def test_files_are_read_at_each_login(tmp_path: Path) -> None:
    for name, text in (
        ("k", "key"),
        ("p", "pass phrase\n"),
        ("c", "first\n"),
        ("known", f"10.0.0.1 {PUBLIC}\n"),
    ):
        (tmp_path / name).write_text(text)
    access = understood(
        identity_file=f"{tmp_path}/k",
        passphrase_file=f"{tmp_path}/p",
        certificate_file=f"{tmp_path}/c",
        known_hosts=f"{tmp_path}/known",
        bastion="10.0.0.2",
    )
    login = access.login("h1", "10.0.0.1")
    assert (login.private_key, login.passphrase, login.certificate) == ("key", "pass phrase", "first")
    assert login.host_keys == (PUBLIC,)
    assert login.bastion is not None
    assert (login.bastion.address, login.bastion.host_keys) == ("10.0.0.2", ())
    assert "pass phrase" not in repr(login)
    (tmp_path / "c").write_text("second\n")
    assert access.login("h1", "10.0.0.1").certificate == "second"
    (tmp_path / "c").unlink()
    with pytest.raises(FileNotFoundError):
        access.login("h1", "10.0.0.1")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("nc %h %p", ("nc", "a; reboot", "22")),
        ("sh -c 'exec nc %h %p'", ("sh", "-c", "exec nc a; reboot 22")),
        ("tunnel --user=%r --at 100%%", ("tunnel", "--user=me", "--at", "100%")),
    ],
)
def test_what_stands_for_a_host_is_one_word(command: str, words: tuple[str, ...]) -> None:
    assert program_of(command, h="a; reboot", p="22", r="me") == words


# --- Sections of clouds -----------------------------------------------------------------------------------------

MACHINE = Machine(
    "i-0a",
    "t",
    "me",
    "chat",
    1,
    0,
    1,
    Zone("aws", "us-east-1", "use1-az4"),
    CapacityType.SPOT,
    MachineState.RUNNING,
    "10.0.0.9",
)


def test_the_machines_of_a_cloud_are_reached_by_its_way() -> None:
    login = login_of(MACHINE, bytes(32))
    assert SshRoute().to(login, "i-0a", "us-east-1", "use1-az4") == login
    session = way_of(None, "aws ssm start-session --target %i --region %g --parameters portNumber=%p", "")
    assert session.to(login, "i-0a", "us-east-1", "use1-az4").program[3:] == (
        "--target",
        "i-0a",
        "--region",
        "us-east-1",
        "--parameters",
        "portNumber=22",
    )
    bastion = way_of({"host": "jump", "user": "ops", "ssh_agent": True, "known_hosts": "/k"}, None, "")
    through = bastion.to(login, "i-0a", "us-east-1", "use1-az4").bastion
    assert through is not None
    assert (through.address, through.user, through.agent, through.private_key) == ("jump", "ops", True, "")


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("bastion: jump", "bastion.user: is missing"),
        ("bastion: {host: jump, user: me}", "bastion.identity_file: is missing (or set ssh_agent: true)"),
        ("{bastion: me@jump, proxy_command: nc %h %p}", "use one of the two"),
        ("proxy_command: nc %x", "proxy_command: '%x' stands for nothing"),
    ],
)
def test_a_section_without_a_way_is_wrong(tmp_path: Path, section: str, said: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"clouds:\n  gcp: {section if section.startswith('{') else '{' + section + '}'}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert said in str(caught.value)
    assert "clouds.gcp" in str(caught.value)
