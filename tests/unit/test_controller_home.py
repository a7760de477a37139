"""The home: its files, its secrets, its configuration, and the secrets sealed with its key."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cryptography.fernet import Fernet

from provisioners.assembly import VmCloudProvisioner
from provisioners.port.base import Candidate, Requirements
from skyserve_cli.clouds import CloudNotEnabledError, Clouds
from skyserve_cli.config import Config, ConfigError, load_config
from skyserve_cli.config_clouds import GcpConfig
from skyserve_cli.config_section import CloudConfig
from skyserve_cli.controller.secret_box import CannotUnsealError, SecretBox
from skyserve_cli.home import Home, HomeError


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home.from_environment({"SKYSERVE_HOME": str(tmp_path / "home")})
    home.create()
    return home


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "root", "url"),
    [
        pytest.param({"SKYSERVE_HOME": "/h"}, "/h", "sqlite:////h/state.db", id="a home"),
        pytest.param({"SKYSERVE_HOME": "/h", "SKYSERVE_DB": "postgresql://x/y"}, "/h", "postgresql://x/y", id="a database"),
        pytest.param({"SKYSERVE_HOME": "/h", "SKYSERVE_DB": ""}, "/h", "sqlite:////h/state.db", id="an empty one"),
    ],
)  # fmt: skip
def test_where_things_are(environ: dict[str, str], root: str, url: str) -> None:
    home = Home.from_environment(environ)
    assert (str(home.root), home.database_url) == (root, url)


def test_the_default_is_below_the_users_own_folder() -> None:
    assert Home.from_environment({}).root == Path.home() / ".skyserve"


def test_a_new_home_is_its_owners_alone(home: Home) -> None:
    home.create()
    assert [mode_of(path) for path in (home.root, home.logs)] == [0o700, 0o700]


def test_secret_files_are_made_once_and_readable_by_the_owner_alone(home: Home) -> None:
    assert (home.token(), home.sealing_keys()[0]) == (home.token(), home.sealing_keys()[0])
    assert len(home.token()) >= 32
    Fernet(home.sealing_keys()[0])
    files = [path for path in home.root.iterdir() if path.is_file()]
    assert {path.name for path in files} == {"controller.token", "sealing.key"}
    assert {mode_of(path) for path in files} == {0o600}


def test_many_that_come_at_once_get_the_same_secret(home: Home) -> None:
    barrier, tokens = threading.Barrier(16), []

    def take() -> None:
        barrier.wait(10)
        tokens.append(home.token())

    threads = [threading.Thread(target=take) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(tokens) == 16
    assert set(tokens) == {home.token()}
    assert [path.name for path in home.root.iterdir() if path.is_file()] == ["controller.token"]


# --- configuration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [None, "", "# nothing\n"], ids=["no file", "empty", "a comment"])
def test_without_settings_there_are_defaults(home: Home, text: str | None) -> None:
    if text is not None:
        home.config.write_text(text)
    config = load_config(home.config)
    assert config == Config()
    assert (config.controller.tick_seconds, config.load_balancer.host) == (1.0, "127.0.0.1")
    assert config.clouds == {"local": CloudConfig(poll_seconds=0.5)}


def test_settings_are_read(home: Home) -> None:
    home.config.write_text(
        "controller: {tick_seconds: 0.2}\nload_balancer: {host: 0.0.0.0, first_port: 4000, last_port: 4000}\n"
        "clouds: {gcp: {poll_seconds: 3}, local: {enabled: false}}\n"
    )
    config = load_config(home.config)
    assert config.controller.tick_seconds == 0.2
    assert (config.load_balancer.host, config.load_balancer.first_port) == ("0.0.0.0", 4000)
    clouds = Clouds(home, config)
    assert clouds.enabled == ("gcp",)
    assert clouds.poll_s() == {"gcp": 3.0}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "controller: {tick_second: 1}",
            'controller.tick_second: there is no such setting; did you mean "tick_seconds"?',
        ),
        ("controller: {tick_seconds: 0}", "controller.tick_seconds"),
        ("controller: {tick_seconds: .nan}", "controller.tick_seconds"),
        ("controller: {tick_seconds: soon}", "controller.tick_seconds"),
        ("controller: {sweep_minutes: 0}", "controller.sweep_minutes"),
        ("load_balancer: {first_port: 80}", "load_balancer.first_port"),
        ("load_balancer: {first_port: 5000, last_port: 4000}", "last_port must not be below first_port"),
        ("load_balancer: {first_port: 40000}", "last_port must not be below first_port"),
        ("clouds: {local: {enabled: perhaps}}", "clouds.local.enabled"),
        ("clouds: {local: {pools: {}}}", "clouds.local.pools: local has no such setting"),
        ("clouds: {aws: {pools: {}, vpc: v}, ssh: {vpc: v}}", "clouds.aws.pools: aws has no such setting"),
        ("clouds: {ssh: {}}", "clouds.ssh.pools: is missing"),
        (
            "clouds: {aws: {region: [x]}}",
            'clouds.aws.region: aws has no such setting; did you mean "regions"?',
        ),
        ("clouds: {azure: {}}", "clouds.azure.subscription_id: is missing"),
        ("clouds: {gcp: {sources: [10.0.0.0/33]}}", "clouds.gcp.sources: '10.0.0.0/33' does not appear"),
        ("clouds: {gcp: {labels: {a: 1}}}", "clouds.gcp.labels.a"),
        ("clouds: {aws: {dead_man_minutes: -1}}", "clouds.aws.dead_man_minutes"),
        (
            "clouds: {local: {dead_man_minutes: 5}}",
            "clouds.local.dead_man_minutes: local has no such setting",
        ),
        ("clouds: [local]", "clouds"),
        ("colour: blue", "colour"),
        ("[]", "config.yaml: Input should be"),
        ("just words", "config.yaml: Input should be"),
        ("a: [", "not YAML"),
        ("a: !!python/object/apply:os.getpid []", "not YAML"),
        ("\x00", "not YAML"),
        ("# " + "x" * (1 << 20), "larger than"),
    ],
    ids=lambda value: value[:40].replace("\x00", "NUL"),
)
def test_a_wrong_configuration_says_where(home: Home, text: str, says: str) -> None:
    home.config.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(home.config)
    assert says in str(raised.value)
    assert str(home.config) in str(raised.value)


def test_all_mistakes_are_told_at_once(home: Home) -> None:
    home.config.write_text("controller: {tick_seconds: 0}\ncolour: blue\n")
    with pytest.raises(ConfigError) as raised:
        load_config(home.config)
    assert len(str(raised.value).splitlines()) == 2


def test_a_configuration_that_cannot_be_read(home: Home) -> None:
    home.config.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(home.config)


def test_bytes_that_are_no_text(home: Home) -> None:
    home.config.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(home.config)


# --- clouds ----------------------------------------------------------------------------------------------------


def a_need(*clouds: str | None) -> Requirements:
    return Requirements(tuple(Candidate(cloud=cloud) for cloud in clouds))


@pytest.mark.parametrize(
    ("enabled", "asked", "resolved"),
    [
        pytest.param(["local"], [None], ["local"], id="any, and there is only this machine"),
        pytest.param(["local", "x", "y"], [None], ["x", "y"], id="any is not this machine"),
        pytest.param(["local", "x"], ["local"], ["local"], id="this machine, named"),
        pytest.param(["x"], ["z", "x"], ["x"], id="what is not enabled is left out"),
    ],
)
def test_candidates_are_resolved_to_enabled_clouds(
    home: Home, enabled: list[str], asked: list[str | None], resolved: list[str]
) -> None:
    clouds = Clouds(home, Config(clouds={name: CloudConfig() for name in enabled}))
    need = clouds.resolve(a_need(*asked))
    assert [candidate.cloud for candidate in need.candidates] == resolved


@pytest.mark.parametrize("asked", ["aws", None], ids=["named", "any"])
def test_nothing_left_is_an_error_that_says_what_to_do(home: Home, asked: str | None) -> None:
    clouds = Clouds(home, Config(clouds={"local": CloudConfig(enabled=asked is not None)}))
    with pytest.raises(CloudNotEnabledError) as raised:
        clouds.resolve(a_need(asked))
    assert str(home.config) in str(raised.value)
    assert (asked or "no cloud") in str(raised.value)


CLOUDS_THAT_RENT = {
    "aws": "aws: {regions: [us-east-1]}",
    "gcp": "gcp: {project: p, regions: [us-central1]}",
    "azure": "azure: {subscription_id: s, regions: [eastus]}",
}


@pytest.mark.parametrize("name", CLOUDS_THAT_RENT)
def test_a_cloud_that_rents_is_made_of_its_section_and_asks_nobody(home: Home, name: str) -> None:
    """Neither credentials nor a network are there."""
    home.config.write_text(f"clouds:\n  {CLOUDS_THAT_RENT[name]}\n")
    cloud = Clouds(home, load_config(home.config)).get(name)
    assert isinstance(cloud, VmCloudProvisioner)
    assert (cloud.name, cloud.machines.name) == (name, name)


@pytest.mark.parametrize("name", CLOUDS_THAT_RENT)
def test_a_region_that_is_none_is_told_by_its_path(home: Home, name: str) -> None:
    home.config.write_text(
        f"clouds:\n  {CLOUDS_THAT_RENT[name].replace('us-', 'su-').replace('eastus', 'eatsus')}\n"
    )
    with pytest.raises(ConfigError, match=rf"clouds\.{name}\.regions: {name} has no region .*did you mean"):
        Clouds(home, load_config(home.config)).get(name)


def test_an_image_for_a_region_that_is_none_is_told_by_its_path(home: Home) -> None:
    home.config.write_text("clouds: {aws: {image: {us-east-1: ami-1, us-esat-2: ami-2}}}\n")
    with pytest.raises(
        ConfigError, match=r"clouds\.aws\.image: aws has no region 'us-esat-2'; did you mean 'us-"
    ):
        Clouds(home, load_config(home.config)).get("aws")


def test_a_cloud_nobody_knows_is_told_with_the_file(home: Home) -> None:
    home.config.write_text("clouds: {asure: {}}\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: there is no cloud 'asure' .*did you mean 'azure'"):
        Clouds(home, load_config(home.config)).get("asure")


def test_a_section_without_settings_has_the_defaults(home: Home) -> None:
    home.config.write_text("clouds:\n  gcp:\n")
    assert load_config(home.config).clouds == {"gcp": GcpConfig()}


def test_a_key_is_not_shown(home: Home) -> None:
    home.config.write_text("clouds: {gcp: {billing_api_key: hunter2}}\n")
    assert "hunter2" not in repr(load_config(home.config))


def test_a_cloud_is_made_once(home: Home) -> None:
    clouds = Clouds(home, Config())
    assert clouds.get("local") is clouds.get("local")
    assert clouds.all() == [clouds.get("local")]


# --- the seal --------------------------------------------------------------------------------------------------

SECRETS = {"TOKEN": "hunter2", "LONG": "é\n" * 1000}


def test_what_is_sealed_can_be_opened_with_the_key_and_not_read_without() -> None:
    seal = SecretBox(Fernet.generate_key())
    sealed = seal.close(SECRETS)
    assert seal.open(sealed) == SECRETS
    assert b"hunter2" not in sealed
    assert seal.close(SECRETS) != sealed


@pytest.mark.parametrize("damage", ["another key", "cut", "changed", "empty"])
def test_what_cannot_be_opened_says_what_to_do(damage: str) -> None:
    seal = SecretBox(Fernet.generate_key())
    sealed = seal.close(SECRETS)
    broken = {"cut": sealed[:-9], "changed": sealed[:-9] + b"AAAAAAAA=", "empty": b""}.get(damage, sealed)
    reader = SecretBox(Fernet.generate_key()) if damage == "another key" else seal
    with pytest.raises(CannotUnsealError, match="serve update"):
        reader.open(broken)


def test_a_digest_is_of_the_content_and_of_the_key() -> None:
    seal, other = SecretBox(Fernet.generate_key()), SecretBox(Fernet.generate_key())
    assert seal.digest({"a": "1", "b": "2"}) == seal.digest({"b": "2", "a": "1"})
    assert seal.digest({"a": "1"}) != seal.digest({"a": "2"})
    assert seal.digest({"a": "1"}) != other.digest({"a": "1"})


def test_a_home_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    root = tmp_path / "home"
    (root / "logs").mkdir(parents=True)
    root.chmod(0o755)
    (root / "logs").chmod(0o777)
    home = Home.from_environment({"SKYSERVE_HOME": str(root)})
    home.create()
    assert [mode_of(path) for path in (home.root, home.logs)] == [0o700, 0o700]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use any folder")
def test_a_home_of_another_user_is_refused() -> None:
    with pytest.raises(HomeError, match="belongs to another user"):
        Home.from_environment({"SKYSERVE_HOME": "/"}).create()


def test_files_that_others_could_read_are_closed_and_folders_of_instances_left_alone(home: Home) -> None:
    (home.load_balancers / "chat").mkdir(parents=True)
    (home.root / "local" / "i-1").mkdir(parents=True)
    loose = [
        home.root / "state.db",
        home.load_balancers / "chat" / "table.json",
        home.logs / "controller.log",
    ]
    users = home.root / "local" / "i-1" / "model.bin"
    for path in (*loose, users):
        path.write_text("x")
        path.chmod(0o644)
    (home.load_balancers / "chat").chmod(0o755)
    outside = home.root.parent / "outside"
    outside.write_text("x")
    outside.chmod(0o644)
    (home.root / "link").symlink_to(outside)
    home.create()
    assert [mode_of(path) for path in loose] == [0o600] * 3
    assert [mode_of(path) for path in (home.load_balancers / "chat", users, outside)] == [0o700, 0o644, 0o644]


def test_the_umask_of_the_user_is_remembered_once() -> None:
    code = (
        "import os; from skyserve_cli.home import make_private\nos.umask(0o027)\nenviron = {}\n"
        "make_private(environ); make_private(environ)\nprint(environ, oct(os.umask(0)))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "{'SKYSERVE_USER_UMASK': '027'} 0o77"
