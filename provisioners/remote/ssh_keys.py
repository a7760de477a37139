"""SSH keys that are not stored: all of them follow from one secret of 32 bytes and a name.

The login key of a machine follows from its owner and service, its host key from its token. So the user data of an order is
the same, byte for byte, whenever it is sent again (clouds that take an idempotency token insist on that), a machine's host key is
known before the machine is, and a controller that was restored from nothing but its secret can log in everywhere. The machines of
a service do not let the key of another service in, and load balancers have another key than replicas. No private key of a login
leaves the controller: users reach machines by way of it.

Derivation is HKDF (RFC 5869) with SHA-256; the keys are Ed25519 (RFC 8032) in OpenSSH's own format (its PROTOCOL.key).
"""

from __future__ import annotations

import hashlib
import hmac
import re
import shlex
import struct
from base64 import b64decode, b64encode
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from policies.model import Role
from provisioners.port.lease import FIRST_S, LEASE_S, LeaseTerms
from provisioners.port.vm import MachineOrder

SECRET_BYTES = 32
LEASE_FOLDER = "/var/lib/skyserve"
DEFAULT_TERMS = LeaseTerms(LEASE_S, FIRST_S)
MAX_USER_DATA_BYTES = 6144  # clouds allow 16 kB and more; a machine needs a few lines

_KIND = b"ssh-ed25519"
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True)
class SshKey:
    """`public` is the line that goes into authorized_keys or known_hosts, `private` the file that ssh reads."""

    public: str
    private: str = field(repr=False)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.public)


@dataclass(frozen=True, slots=True)
class Keys:
    """All keys of one owner. `secret` are the 32 bytes of the home that everything follows from."""

    secret: bytes = field(repr=False)
    owner: str

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise ValueError(f"the secret must have {SECRET_BYTES} bytes, not {len(self.secret)}")

    def login(self, service: str, role: Role = Role.REPLICA) -> SshKey:
        """Return who may log in on the machines of a service that have this role."""
        purpose = "balancer login" if role is Role.LOAD_BALANCER else "login"
        return _derived(self.secret, f"{purpose}\0{self.owner}\0{service}", f"skyserve-{self.owner}")

    def owner_login(self) -> SshKey:
        """Return who may log in on all of the owner's machines that version 0.2 and earlier made."""
        return _derived(self.secret, f"login\0{self.owner}", f"skyserve-{self.owner}")

    def host(self, token: str) -> SshKey:
        """Return who the machine of that token is."""
        return _derived(self.secret, f"host\0{self.owner}\0{token}", "skyserve-host")

    def boot_host(self, token: str) -> SshKey:
        """Return who it is until it has been logged in to for the first time.

        It stands in user data, which others may read.
        """
        return _derived(self.secret, f"boot host\0{self.owner}\0{token}", "skyserve-boot-host")


def generations(secret: bytes) -> list[bytes]:
    """Return the secrets of a home, newest first: they stand one after the other (`Home.machine_secrets`). ValueError if they are none."""
    if not secret or len(secret) % SECRET_BYTES:
        raise ValueError(f"the secrets must have {SECRET_BYTES} bytes each, not {len(secret)} in all")
    return [secret[start : start + SECRET_BYTES] for start in range(0, len(secret), SECRET_BYTES)]


def fingerprint(public: str) -> str:
    """As `ssh-keygen -l` prints it."""
    blob = _blob_of(public)
    return "SHA256:" + b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def user_data(
    order: MachineOrder,
    host_key: SshKey,
    terms: LeaseTerms | None = DEFAULT_TERMS,
    terminate_script: str = "",
) -> str:
    """Return the script that a machine runs as root when it boots, the same on every cloud; a few kB.

    It makes the user of the order, lets the order's key in, gives sshd the host key that we expect, and sets the
    dead-man switch, which ends a machine whose lease is over (`lease`). The switch counts minutes, and reads what the
    host agent leaves in `LEASE_FOLDER`: `lease` for a visit, `traffic` for traffic, `served` once the replica has responded. It
    writes `count` for the agent. Without `terms` there is no switch.

    `terminate_script` is a program for python3 by which the machine has its cloud delete it, where a shutdown would leave something
    that is billed. It is tried for ten minutes; then, and without it at once, the machine shuts down.

    It can be run any number of times: some clouds do so at every boot.
    """
    if not _USER.fullmatch(order.user):
        raise ValueError(f"{order.user!r} is no user name")
    login = _LOGIN.format(
        user=order.user,
        public_key=shlex.quote(order.public_key.strip()),
        host_private=host_key.private.strip(),
        host_public=host_key.public,
    )
    return login if terms is None else login + _dead_man(terms, terminate_script)


def lasting_keys_script(user: str, login_key: SshKey, host_key: SshKey) -> str:
    """Return what gives a machine the keys that last, as root; any number of times, and from any line on again.

    `user` can log in with the login key afterwards, and no one with another key: what is in `authorized_keys` does not count
    any more, neither what user data and the cloud's own agent write there nor what the image's own user had. A machine that shows
    the new host key therefore accepts the new login key alone.
    """
    return lasting_login_script(user, login_key) + _HOST_KEY.format(
        host_private=host_key.private.strip(), host_public=host_key.public
    )


def lasting_login_script(user: str, login_key: SshKey) -> str:
    """Return the first part of it, which has an effect when sshd is started again."""
    return _LASTING_LOGIN.format(user=user, public_key=shlex.quote(login_key.public))


def own_login_script(login_key: SshKey) -> str:
    """Return what lets in this login key alone on an image without sudo, run by the user who logs in."""
    return _OWN_LOGIN.format(public_key=shlex.quote(login_key.public))


def _dead_man(terms: LeaseTerms, terminate_script: str) -> str:
    every_s = max(1, min(60, min(terms.lease_s, terms.first_s) // 30))
    switch = _DEAD_MAN.format(
        folder=LEASE_FOLDER,
        every_s=every_s,
        lease=max(2, terms.lease_s // every_s),
        first=max(2, terms.first_s // every_s),
        most=max(2, terms.most_s // every_s),
        tries=_DELETION_TRIES if terminate_script else 0,
    )
    end = f"cat >$d/end.py <<'E'\n{terminate_script.strip()}\nE\n" if terminate_script else ""
    return (
        f"d={LEASE_FOLDER}; mkdir -p $d; chown $u $d\n{end}{switch}{_SWITCH_ON.format(folder=LEASE_FOLDER)}"
    )


# The account gets the password "*" (of no one) instead of "!" (locked): a sshd without PAM lets no locked account in.
# Ubuntu upgrades itself in the first minutes of a machine, and later: that holds the lock of dpkg while `setup` installs
# packages, and replaces the GPU driver's libraries under the loaded kernel module.
# sshd reads its host keys when it starts. A signal (where there is no systemd) may come before it listens to signals, and
# end it: its supervisor starts it again.
_LOGIN = """\
#!/bin/sh
umask 077
u={user}; k=/etc/ssh/ssh_host_ed25519_key
id $u >/dev/null 2>&1 || useradd -m -s /bin/bash -p '*' $u
usermod -aG docker $u 2>/dev/null
h=$(getent passwd $u | cut -d: -f6)
mkdir -p $h/.ssh /etc/sudoers.d
[ -e $h/.ssh/skyserve.lasting ] || grep -qxF {public_key} $h/.ssh/authorized_keys 2>/dev/null ||
echo {public_key} >>$h/.ssh/authorized_keys
chown -R $u $h/.ssh
echo "$u ALL=(ALL) NOPASSWD:ALL" >/etc/sudoers.d/skyserve
[ -e $k.lasting ] || {{ cat >$k.new <<'E'
{host_private}
E
echo '{host_public}' >$k.pub; chmod 644 $k.pub; mv -f $k.new $k; }}
grep -qs "^HostKey $k" /etc/ssh/sshd_config || sed -i "1i HostKey $k" /etc/ssh/sshd_config
if [ -d /etc/apt/apt.conf.d ]; then echo 'DPkg::Lock::Timeout "600";' >/etc/apt/apt.conf.d/99skyserve; fi
if [ -d /run/systemd/system ]; then
systemctl disable --now unattended-upgrades apt-daily.timer apt-daily-upgrade.timer 2>/dev/null
systemctl restart ssh 2>/dev/null || systemctl restart sshd
else kill -HUP $(cat /run/sshd.pid) 2>/dev/null; fi
"""

# The keys that sshd reads are in a folder that nothing else writes. The line in its configuration comes after the file, and the
# host key after both: a machine that has been stopped in between lets a key in, and its host key says that it is not done.
_LASTING_LOGIN = """\
umask 022
d=/etc/ssh/skyserve; mkdir -p $d
echo {public_key} >$d/{user}.new; mv -f $d/{user}.new $d/{user}
grep -qsxF "AuthorizedKeysFile $d/%u" /etc/ssh/sshd_config || sed -i "1i AuthorizedKeysFile $d/%u" /etc/ssh/sshd_config
"""

_OWN_LOGIN = """\
umask 077
: >~/.ssh/skyserve.lasting
echo {public_key} >~/.ssh/authorized_keys.new; mv -f ~/.ssh/authorized_keys.new ~/.ssh/authorized_keys
"""

# The file at `.lasting` keeps user data, which some clouds run at every boot, from bringing the first key back.
_HOST_KEY = """\
umask 077
k=/etc/ssh/ssh_host_ed25519_key
: >$k.lasting
cat >$k.new <<'E'
{host_private}
E
echo '{host_public}' >$k.pub; chmod 644 $k.pub; mv -f $k.new $k
if [ -d /run/systemd/system ]; then
systemctl restart ssh 2>/dev/null || systemctl restart sshd
else kill -HUP $(cat /run/sshd.pid) 2>/dev/null; fi
"""

# n: periods since a visit or traffic, m: since a visit; both survive a reboot, which renews nothing. l: the lease that holds.
# t: tries to have the machine deleted.
_DEAD_MAN = """\
cat >$d/deadman <<'E'
cd {folder} || exit 1
umask 022
n=0 m=0 t=0
[ ! -r count ] || read -r n m x <count
while sleep {every_s}; do
n=$((n+1)) m=$((m+1)) l={first}
[ ! -e traffic ] || {{ rm -f traffic; n=0; }}
[ ! -e lease ] || {{ rm -f lease; n=0 m=0; }}
[ ! -e served ] || l={lease}
echo $n $m $l {most} {every_s} >count.new; mv -f count.new count
[ $n -ge $l ] || [ $m -ge {most} ] || {{ t=0; continue; }}
[ $t -ge {tries} ] || {{ t=$((t+1)); timeout 60 python3 end.py; continue; }}
shutdown -h now
done
E
"""

_SWITCH_ON = """\
if [ -d /run/systemd/system ]; then
printf '[Service]\\nExecStart=/bin/sh {folder}/deadman\\nRestart=always\\n[Install]\\nWantedBy=multi-user.target\\n' \\
>/etc/systemd/system/skyserve-deadman.service
systemctl enable --now skyserve-deadman
else setsid sh $d/deadman >/dev/null 2>&1 </dev/null &
fi
"""

_DELETION_TRIES = 10


def _derived(secret: bytes, purpose: str, comment: str) -> SshKey:
    seed = _hkdf(secret, f"skyserve ssh key\0{purpose}".encode())
    public = Ed25519PrivateKey.from_private_bytes(seed).public_key()
    return _openssh(seed, public.public_bytes(Encoding.Raw, PublicFormat.Raw), comment)


def derived_seed(secret: bytes, purpose: str) -> bytes:
    """32 bytes for another kind of key, which no SSH key is made of."""
    return _hkdf(secret, f"skyserve key\0{purpose}".encode())


def _hkdf(secret: bytes, info: bytes) -> bytes:
    """Return one block of it, which is all that a seed needs."""
    extracted = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(extracted, info + b"\1", "sha256")


def _openssh(seed: bytes, public: bytes, comment: str) -> SshKey:
    """In OpenSSH's format.

    `cryptography` can write it too, but puts four random bytes in (`check`, which only says whether a passphrase was
    right), and then user data would differ from one time to the next.
    """
    blob = _string(_KIND) + _string(public)
    check = hashlib.sha256(blob).digest()[:4]
    secret = check * 2 + blob + _string(seed + public) + _string(comment.encode())
    secret += bytes(range(1, 1 + -len(secret) % 8))
    body = b"openssh-key-v1\0" + _string(b"none") * 2 + _string(b"") + struct.pack(">I", 1)
    text = b64encode(body + _string(blob) + _string(secret)).decode()
    lines = "\n".join(text[at : at + 70] for at in range(0, len(text), 70))
    return SshKey(
        public=f"{_KIND.decode()} {b64encode(blob).decode()} {comment}",
        private=f"-----BEGIN OPENSSH PRIVATE KEY-----\n{lines}\n-----END OPENSSH PRIVATE KEY-----\n",
    )


def _string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _blob_of(public: str) -> bytes:
    return b64decode(public.split()[1])
