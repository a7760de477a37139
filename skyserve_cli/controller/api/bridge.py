"""Joins the standard streams to the socket of a home's controller. It runs on the controller's host, at the end of an SSH session.

Its first line says whether it can: "skyserve-bridge ok TOKEN" or "skyserve-bridge no REASON". What a login shell prints before
that line is not ours. The token crosses inside SSH and is in no command. The host's Python may be 3.8, so this needs the
standard library alone.

    python3 -c SOURCE HOME          a relative HOME starts at the user's home directory
"""

import os
import select
import socket
import sys
from pathlib import Path

CHUNK = 65536


def connected(home: Path) -> "tuple[str, socket.socket]":
    """Return the token and a connection to the controller. Raises OSError, whose text is a sentence."""
    try:
        os.chdir(home)
        token = Path("controller.token").read_text().strip()
    except OSError as error:
        raise OSError(f"{home} is no home of a controller: {error.strerror}") from None
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.connect(
            "controller.sock"
        )  # by its name in this folder: a whole path may be too long for an address
    except OSError:
        raise OSError("no controller runs there; start it there with `serve controller start`") from None
    return token, link


def join(link: socket.socket) -> None:
    """Pass bytes on in both directions until one side has ended."""
    while True:
        for source in select.select([0, link.fileno()], [], [])[0]:
            data = os.read(source, CHUNK)
            if not data:
                return
            if source == 0:
                link.sendall(data)
                continue
            while data:
                data = data[os.write(1, data) :]


def main(home: str) -> None:
    try:
        token, link = connected(Path.home() / home)
    except OSError as error:
        os.write(1, f"skyserve-bridge no {error}\n".encode())
        return
    try:
        os.write(1, f"skyserve-bridge ok {token}\n".encode())
        join(link)
    except OSError:  # the other side is gone
        pass


if __name__ == "__main__":
    main(sys.argv[1])
