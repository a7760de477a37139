"""Where things are: one folder per user, `$SKYSERVE_HOME` (default `~/.skyserve`)."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from provisioners.files import write_bytes

#: The umask of the user, in octal, for what the controller starts on the user's behalf.
USER_UMASK = "SKYSERVE_USER_UMASK"
#: The name of the Pod that a controller runs in.
POD_NAME = "SKYSERVE_POD_NAME"


MACHINE_SECRET_BYTES = 32


class HomeError(Exception):
    """The home folder cannot be made."""


@dataclass(frozen=True, slots=True)
class Home:
    """The paths of one home. `database_url` is `$SKYSERVE_DB` or SQLite inside the home."""

    root: Path
    database_url: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Home:
        chosen = environ.get("SKYSERVE_HOME")
        root = Path(chosen).expanduser() if chosen else Path.home() / ".skyserve"
        root = root.absolute()
        return cls(root, environ.get("SKYSERVE_DB") or f"sqlite:///{root / 'state.db'}")

    def create(self) -> None:
        """Make the folder, for its owner alone, or take away what others may do in one that is there.

        Raises HomeError where that cannot be.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.logs.mkdir(exist_ok=True, mode=0o700)
            for folder in (self.root, self.logs):
                found = folder.stat()
                if os.geteuid() not in (0, found.st_uid):
                    raise HomeError(
                        f"{folder} belongs to another user; set SKYSERVE_HOME to a folder of your own"
                    )
                if stat.S_IMODE(found.st_mode) & 0o077:
                    folder.chmod(0o700)
            self._close_files()
        except OSError as error:
            raise HomeError(
                f"no home can be made at {self.root}: {error.strerror}; set SKYSERVE_HOME"
            ) from None

    def _close_files(self) -> None:
        """Remove the permissions of other users from the files that an earlier release or another program left."""
        candidates = [*self.root.iterdir(), *self.backups.glob("*")]
        for folder in (self.logs, self.load_balancers):
            candidates += folder.rglob("*")
        for path in candidates:
            try:
                found = path.lstat()
                is_ours = stat.S_ISREG(found.st_mode) or (
                    stat.S_ISDIR(found.st_mode) and path.parent != self.root
                )
                if is_ours and stat.S_IMODE(found.st_mode) & 0o077:
                    path.chmod(stat.S_IMODE(found.st_mode) & 0o700)
            except FileNotFoundError:  # a running controller has just removed or replaced it
                continue

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def controller_log(self) -> Path:
        return self.logs / "controller.log"

    @property
    def lock(self) -> Path:
        """Held by the one controller of this home for as long as it runs."""
        return self.root / "controller.lock"

    @property
    def supervisor_lock(self) -> Path:
        """Held by the supervisor, which starts the controller again when it fails."""
        return self.root / "keeper.lock"

    @property
    def controller_address(self) -> Path:
        """JSON: the process of the controller."""
        return self.root / "controller.json"

    @property
    def controller_phase(self) -> Path:
        """JSON, while the controller starts or stops and its API does not respond: what it is doing, and since when."""
        return self.root / "controller.phase.json"

    @property
    def controller_socket(self) -> Path:
        """Where the controller's API listens."""
        return self.root / "controller.sock"

    @property
    def load_balancers(self) -> Path:
        return self.root / "lb"

    def load_balancer_log(self, service: str) -> Path:
        """The log of the agent on this host."""
        return self.load_balancers / Path(service).name / "agent.log"

    @property
    def own_addresses(self) -> Path:
        """From where machines have seen this host come, and when."""
        return self.root / "own_addresses.json"

    def first_logins(self, cloud: str) -> Path:
        """Return the host keys that machines of a cloud without user data showed first."""
        return self.root / "first_logins" / cloud

    @property
    def hosts_seen(self) -> Path:
        """What the user's own hosts were last seen to have."""
        return self.root / "hosts"

    @property
    def backups(self) -> Path:
        """The daily copies of an SQLite database, and what `restore --force` has replaced."""
        return self.root / "backups"

    @property
    def known_state(self) -> Path:
        """JSON: whose database this home has, and how far it had come (`known_state`)."""
        return self.root / "known_state.json"

    @property
    def why_ended(self) -> Path:
        """Why the last controller ended for good, in a sentence; not there once one has started."""
        return self.root / "why_ended"

    @property
    def restored(self) -> Path:
        """JSON, from a restore until its machines are adopted: the first replica id that the backup did not know, by service."""
        return self.root / "restored.json"

    @property
    def moved(self) -> Path:
        """JSON: where the controller of this home was moved to. While it is there, none starts here."""
        return self.root / "moved.json"

    @property
    def incoming(self) -> Path:
        """JSON, while a move from another home fills this one: no controller starts here before it is complete."""
        return self.root / "incoming.json"

    @property
    def check_launches(self) -> Path:
        """JSON: the clouds in which `serve check --launch` has started and not terminated, by the owner of its machine."""
        return self.root / "check_launches.json"

    @property
    def check_launches_lock(self) -> Path:
        """Held by the one `serve check --launch` that is at work."""
        return self.root / "check_launches.lock"

    @property
    def callbacks(self) -> Path:
        """JSON: up to which event the commands of `event_callback` have run."""
        return self.root / "callbacks.json"

    @property
    def backup_hinted(self) -> Path:
        """There once `serve up` has said that a copy of the home's keys is needed, or there is one."""
        return self.root / "backup_hinted"

    @property
    def log_archive(self) -> Path:
        """The ends of the logs of replicas that failed."""
        return self.logs / "replicas"

    @property
    def uploads(self) -> Path:
        """The files that commands on other hosts have sent (`controller.uploads`)."""
        return self.root / "uploads"

    @property
    def native(self) -> Path:
        """Wheels of this release with native modules for other machines than this one, put there by the user."""
        return self.root / "native"

    @property
    def contexts(self) -> Path:
        """JSON: controllers on other hosts, with their tokens, and which one the commands call."""
        return self.root / "contexts.json"

    @property
    def dashboard(self) -> Path:
        """JSON: the port of the page and digests of its sessions."""
        return self.root / "dashboard.json"

    def token(self) -> str:
        """Return the secret every call of the controller's API carries; made on first use."""
        return secret_file(self.token_file, new_token).decode()

    def key_files(self) -> tuple[Path, ...]:
        """Return the files without which a database is of no use. They need not exist."""
        return self.root / "sealing.key", self.root / "machines.key"

    def sealing_keys(self) -> tuple[bytes, ...]:
        """Return the key that seals secrets in the database, and while a rotation is under way those of before, which still open.

        Made on first use, one a line, never stored with the database.
        """
        return tuple(secret_file(self.sealing_key_file, _new_sealing_key).split())

    def digest_key(self) -> bytes | None:
        """Return the key of digests of secrets, if it is not the one that seals: that of before the first rotation."""
        return self.digest_key_file.read_bytes() if self.digest_key_file.exists() else None

    @property
    def token_file(self) -> Path:
        return self.root / "controller.token"

    def metrics_token(self) -> str:
        """Return the secret that reads the controller's metrics and nothing else; made on first use."""
        return secret_file(self.metrics_token_file, new_token).decode()

    @property
    def metrics_token_file(self) -> Path:
        return self.root / "metrics.token"

    @property
    def sealing_key_file(self) -> Path:
        return self.root / "sealing.key"

    @property
    def digest_key_file(self) -> Path:
        return self.root / "digest.key"

    @property
    def machine_secret_file(self) -> Path:
        return self.root / "machines.key"

    def machine_secrets(self) -> tuple[bytes, ...]:
        """Return what the keys of machines follow from, newest first; made on first use.

        SSH keys follow from the first one. The others are of before rotations while machines ran (`key_rotation`).
        """
        found = secret_file(self.machine_secret_file, lambda: secrets.token_bytes(MACHINE_SECRET_BYTES))
        starts = range(0, len(found), MACHINE_SECRET_BYTES)
        return tuple(found[start : start + MACHINE_SECRET_BYTES] for start in starts)

    def machine_secret(self) -> bytes:
        """Return what certificates of machines and tokens of their agents follow from: the oldest one.

        It does not change while machines run, because they have these from when they were launched.
        """
        return self.machine_secrets()[-1]


def make_private(environ: MutableMapping[str, str]) -> None:
    """Give files that this process and its children create to their owner alone; remember the umask of before."""
    environ.setdefault(USER_UMASK, f"{os.umask(0o077):03o}")


def is_held(lock: Path) -> bool:
    """Return whether a process that holds this lock runs: the kernel lets go of it when the last one has exited."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:  # no such file, or none that could be
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _new_sealing_key() -> bytes:
    from cryptography.fernet import Fernet  # commands that only read have no use for it, and it costs 30 ms

    return Fernet.generate_key()


def new_token() -> bytes:
    return secrets.token_urlsafe(32).encode()


def write_private(path: Path, content: bytes) -> None:
    """Write, or replace, a file that only its owner may read. After a crash it has the old content or the new one."""
    write_bytes(path, content, mode=0o600, is_durable=True)


def secret_file(path: Path, make: Callable[[], bytes]) -> bytes:
    """The content of a file only its owner may read, made by `make` if it is not there.

    Two processes that come at once end up with the same content: the file appears whole, by link, and the first one wins.
    """
    if not path.exists():
        draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(make())
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return path.read_bytes()
