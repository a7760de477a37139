"""The relay of `_tls_relay.c`: what `tls_proxy` does, without Python for each byte that passes. Where the machine can run it."""

from __future__ import annotations

import ctypes
import os
import pkgutil
import socket
import threading
from typing import TYPE_CHECKING, NoReturn

from provisioners.remote.host_agent import lease

if TYPE_CHECKING:  # Python 3.8 cannot evaluate these
    from pathlib import Path

LIBRARY = "_tls_relay.so"
_MOST_THREADS = 4
_CORES_OF_A_THREAD = 4  # one thread moves some 50,000 chunks a second


class TlsRelay:
    """The library, with the certificate of the file `pem`. Raises OSError with the reason where it cannot be used here.

    `folder` gets a copy of the library, as a zip file cannot be mapped into memory.
    """

    def __init__(self, folder: Path, pem: Path) -> None:
        try:
            content = pkgutil.get_data(__name__.rpartition(".")[0], LIBRARY)
        except OSError:
            content = None
        if content is None:
            raise OSError("it was not compiled when the controller was installed (no C compiler)")
        copy = folder / LIBRARY
        new = copy.with_suffix(".new")
        new.write_bytes(content)
        new.replace(copy)
        self._library = ctypes.CDLL(str(copy))
        self._library.tls_relay_prepare.restype = ctypes.c_char_p
        why = self._library.tls_relay_prepare(os.fsencode(pem))
        if why is not None:
            raise OSError(why.decode())

    def run(self, listener: socket.socket, to: int, most: int) -> NoReturn:
        """Take connections for ever, at most so many at a time."""
        notes, written = os.pipe()
        os.set_blocking(written, False)
        threading.Thread(target=_write_notes, args=(notes,), daemon=True).start()
        threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // _CORES_OF_A_THREAD))
        error = self._library.tls_relay_run(listener.fileno(), to, most, threads, written)
        raise OSError(error, os.strerror(error))


def _write_notes(pipe: int) -> None:
    while letters := os.read(pipe, 4096):
        if b"s" in letters:
            lease.served()
        if b"t" in letters:
            lease.traffic()
