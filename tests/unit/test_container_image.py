"""How a machine gets docker, a login and the image: the scripts, run by sh with programs that note how they are called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from provisioners.port.docker_image import PASSWORD, SERVER, USERNAME, full_name, registry_of
from provisioners.remote.container_steps import steps
from provisioners.remote.machine_tools import needs, pip_install
from provisioners.remote.step import Content, Step

BASE = (
    "sh",
    "cat",
    "printf",
    "id",
    "sleep",
    "mktemp",
    "rm",
    "env",
    "python3",
    "true",
    "dirname",
    "mkdir",
    "chmod",
)


class Machine:
    """A PATH of its own, with a note of every call of what stands in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.calls = folder / "calls"
        self.calls.touch()
        for name in BASE:
            found = next(path for path in (Path("/usr/bin"), Path("/bin")) if (path / name).exists())
            (self.bin / name).symlink_to(found / name)
        self.has("sudo", '[ "$1" = -n ] && shift; exec "$@"')

    def has(self, name: str, body: str = "") -> None:
        program = self.bin / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >>{self.calls}\n{body}\n')
        program.chmod(0o755)

    def run(self, step: Step | str) -> subprocess.CompletedProcess[str]:
        script = step if isinstance(step, str) else step.script
        sends = step.sends if isinstance(step, Step) else None
        return subprocess.run(
            ["/bin/sh", "-c", script],
            env={"PATH": str(self.bin), "HOME": str(self.folder), "TMPDIR": os.environ.get("TMPDIR", "/tmp")},
            input=sends.data.decode() if isinstance(sends, Content) else "",
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

    def called(self, program: str) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.partition(" ")[0] == program]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


APT = """case "$*" in *install*docker.io*) cat >BIN/docker <<'E'
#!/bin/sh
echo "docker $*" >>CALLS
[ "$1 $2" != "image inspect" ]
#!/bin/sh
echo "docker $*" >>CALLS
[ "$1 $2" != "image inspect" ]
E
chmod 755 BIN/docker;; esac"""


def of(image: str, *, gpus: int = 0, may_install: bool = True, **variables: str) -> dict[str, Step]:
    return {step.name: step for step in steps(image, variables, gpus=gpus, may_install=may_install)}


@pytest.mark.parametrize(
    ("image", "host"),
    [
        ("vllm/vllm-openai:v0.9", ""),
        ("ubuntu", ""),
        ("quay.io/x/y:1", "quay.io"),
        ("localhost:5000/x", "localhost:5000"),
        ("123456789012.dkr.ecr.eu-west-1.amazonaws.com/x:1", "123456789012.dkr.ecr.eu-west-1.amazonaws.com"),
    ],
)
def test_the_registry_of_an_image(image: str, host: str) -> None:
    assert registry_of(image) == host


@pytest.mark.parametrize(
    ("image", "server", "name"),
    [
        ("team/vllm:1", "", "team/vllm:1"),
        ("team/vllm:1", "reg.example.com/", "reg.example.com/team/vllm:1"),
        ("reg.example.com/team/vllm:1", "reg.example.com", "reg.example.com/team/vllm:1"),
    ],
)
def test_the_server_of_the_secrets_is_part_of_the_name(image: str, server: str, name: str) -> None:
    assert full_name(image, {SERVER: server} if server else {}) == name


def test_docker_is_installed_where_it_is_missing_and_only_there(machine: Machine) -> None:
    machine.has("apt-get", APT.replace("BIN", str(machine.bin)).replace("CALLS", str(machine.calls)))
    for name in ("usermod", "chgrp", "sleep"):
        (machine.bin / name).unlink(missing_ok=True)
        machine.has(name)
    step = of("vllm/vllm-openai")["docker"]
    assert machine.run(step).returncode == 0
    assert [line.rpartition(" ")[2] for line in machine.called("apt-get")] == ["update", "docker.io"]
    assert "Lock::Timeout=600" in machine.called("apt-get")[0]
    assert machine.called("chgrp")[0].endswith("/var/run/docker.sock")
    assert machine.run(step).returncode == 0
    assert len(machine.called("apt-get")) == 2


def test_what_cannot_be_installed_is_one_sentence(machine: Machine) -> None:
    machine.has("apt-get", "exit 100")
    said = machine.run(of("x")["docker"])
    assert said.returncode == 127
    assert said.stderr.strip().endswith("apt could not install docker.io; use an image that has it")
    machine.has("docker")
    said = machine.run(of("x", gpus=2)["docker"])
    assert "GPUs in containers, which needs NVIDIA's container toolkit: apt could not install" in said.stderr
    machine.has("nvidia-container-runtime-hook")
    assert machine.run(of("x", gpus=2)["docker"]).returncode == 0


def test_nothing_is_installed_on_a_host_of_ones_own(machine: Machine) -> None:
    only = of("x", may_install=False)
    assert list(only) == ["image"]
    said = machine.run(only["image"])
    assert (said.returncode, said.stderr.strip()) == (
        127,
        "docker:x needs the program docker, which this machine's image does not have",
    )


DOCKER = """case "$1" in image) exit 1;; login) cat >>CALLS; echo >>CALLS; echo "config $DOCKER_CONFIG" >>CALLS;; esac"""


def test_a_login_by_secrets_is_not_on_a_command_line_and_leaves_nothing(machine: Machine) -> None:
    machine.has("docker", DOCKER.replace("CALLS", str(machine.calls)))
    step = of("reg.example.com/x:1", **{USERNAME: "me you", PASSWORD: "s3cret"})["image"]
    assert "s3cret" not in step.script
    assert "s3cret" not in repr(step)
    assert machine.run(step).returncode == 0
    said = machine.calls.read_text().splitlines()
    assert said[1:3] == ["docker login --username me you --password-stdin reg.example.com", "s3cret"]
    assert said[-1] == "docker pull --quiet reg.example.com/x:1"
    folder = next(line for line in said if line.startswith("config ")).removeprefix("config ")
    assert folder
    assert not Path(folder).exists()


def test_an_image_that_is_there_needs_no_login(machine: Machine) -> None:
    machine.has("docker")
    step = of("reg.example.com/x:1", **{USERNAME: "me", PASSWORD: "s3cret"})["image"]
    assert machine.run(step).returncode == 0
    assert machine.called("docker") == ["docker image inspect reg.example.com/x:1"]


def test_the_registry_of_aws_is_logged_in_to_by_the_machines_identity(machine: Machine) -> None:
    host = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
    machine.has("docker", DOCKER.replace("CALLS", str(machine.calls)))
    machine.has("aws", "echo token")
    assert machine.run(of(f"{host}/x:1")["image"]).returncode == 0
    assert machine.called("aws") == ["aws ecr get-login-password --region eu-west-1"]
    assert f"docker login --username AWS --password-stdin {host}" in machine.called("docker")
    assert "token" in machine.calls.read_text().splitlines()
    machine.has("aws", "exit 255")
    said = machine.run(of(f"{host}/x:1")["image"])
    assert said.returncode == 0  # by the pull: the image may be public
    assert (
        f"this machine has no identity for {host}: set clouds.aws.instance_profile, or the secrets"
        in said.stderr
    )


@pytest.mark.parametrize(
    ("host", "user", "setting"),
    [
        ("europe-docker.pkg.dev", "oauth2accesstoken", "clouds.gcp.service_account"),
        ("gcr.io", "oauth2accesstoken", "clouds.gcp.service_account"),
        ("eu.gcr.io", "oauth2accesstoken", "clouds.gcp.service_account"),
        ("myteam.azurecr.io", "00000000-0000-0000-0000-000000000000", "clouds.azure.identity"),
    ],
)
def test_the_registries_of_other_clouds_take_a_token_of_the_metadata_service(
    machine: Machine, host: str, user: str, setting: str
) -> None:
    machine.has("docker", DOCKER.replace("CALLS", str(machine.calls)))
    (machine.bin / "python3").unlink()
    machine.has("python3", "echo token")
    assert machine.run(of(f"{host}/p/x:1")["image"]).returncode == 0
    assert f"docker login --username {user} --password-stdin {host}" in machine.called("docker")
    machine.has("python3", "exit 1")
    assert setting in machine.run(of(f"{host}/p/x:1")["image"]).stderr


@pytest.mark.parametrize("image", ["vllm/vllm-openai", "quay.io/x", "evil-docker.pkg.dev.example.com/x"])
def test_other_registries_are_not_logged_in_to(machine: Machine, image: str) -> None:
    machine.has("docker", DOCKER.replace("CALLS", str(machine.calls)))
    assert machine.run(of(image)["image"]).returncode == 0
    assert [line.split()[1] for line in machine.called("docker")] == ["image", "pull"]


def test_a_program_comes_from_pip_once(machine: Machine) -> None:
    venv = machine.folder / ".skyserve" / "tools" / "bin"
    (machine.bin / "python3").unlink()
    machine.has(
        "python3",
        f"mkdir -p {venv}\n"
        f"printf '#!/bin/sh\\necho pip \"$@\" >>{machine.calls}\\nprintf x >{venv}/aws\\nchmod 755 {venv}/aws\\n' >{venv}/pip\n"
        f"chmod 755 {venv}/pip",
    )
    script = pip_install("aws", "awscli", "s3://bucket")
    assert machine.run(f"{script}\ncommand -v aws").stdout.strip() == str(venv / "aws")
    assert machine.called("pip") == ["pip install --quiet awscli"]
    machine.run(script)
    assert len(machine.called("pip")) == 1


def test_a_program_that_pip_cannot_install_is_one_sentence(machine: Machine) -> None:
    (machine.bin / "python3").unlink()
    machine.has("python3", "exit 1")
    said = machine.run(pip_install("aws", "awscli", "s3://bucket"))
    assert said.returncode == 127
    assert "s3://bucket" in said.stderr
    assert machine.run(needs("aws", "s3://bucket")).returncode == 127
