"""Programs that a step needs on a machine, and how a rented machine gets one that its image lacks: shell text. Pure.

Packages come from the sources that the image is configured for (apt, pip); the product names no host of its own.
"""

from __future__ import annotations

import shlex

VENV = '"$HOME"/.skyserve/tools'
_WAIT_S = 600  # for a package manager that is at work at the first boot


def needs(program: str, what: str) -> str:
    """Fails with one sentence if the program is missing."""
    sentence = f"{what} needs the program {program}, which this machine's image does not have"
    return f"command -v {program} >/dev/null || {{ echo {shlex.quote(sentence)} >&2; exit 127; }}"


def apt_install(package: str, what: str) -> str:
    """Fails with one sentence if apt cannot install it."""
    sentence = f"{what}: apt could not install {package}; use an image that has it"
    apt = f"sudo -n env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout={_WAIT_S}"
    return (
        f"{{ command -v apt-get >/dev/null && {apt} update >/dev/null && {apt} install -y {shlex.quote(package)} >/dev/null; }} "
        f"|| {{ echo {shlex.quote(sentence)} >&2; exit 127; }}"
    )


def pip_install(program: str, package: str, what: str) -> str:
    """Into an environment of our own, which is put on PATH; nothing where the program is there. Fails with one sentence."""
    sentence = (
        f"{what} needs the program {program}, and pip could not install {package}; use an image that has it"
    )
    venv = f"{{ python3 -m venv {VENV} 2>/dev/null || {{ {apt_install('python3-venv', what)}; python3 -m venv {VENV}; }}; }}"
    return (
        f"PATH=$PATH:{VENV}/bin; export PATH; command -v {program} >/dev/null || "
        f"{{ {venv} && {VENV}/bin/pip install --quiet {package}; }} || "
        f"{{ echo {shlex.quote(sentence)} >&2; exit 127; }}"
    )


def aws_program() -> str:
    """Return a command that stands for `aws`."""
    return f"{{ {pip_install('aws', 'awscli', 'a registry of AWS')}; }} >&2 && aws"
