"""Waiting for the output of a command where a process has many connections."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator
from typing import Any

import pytest

from provisioners.remote.ssh import wait_readable

HIGH = 1100  # select takes descriptors below 1024 only


class Channel:
    def __init__(self, number: int) -> None:
        self.number = number

    def fileno(self) -> int:
        return self.number


@pytest.fixture
def pipe() -> Iterator[tuple[Any, int]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= HIGH:
        pytest.skip(f"the hard limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, HIGH + 100), hard))
    reader, writer = os.pipe()
    high = fcntl.fcntl(reader, fcntl.F_DUPFD, HIGH)
    try:
        yield Channel(high), writer
    finally:
        for number in (reader, writer, high):
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_high_descriptor_is_waited_for(pipe: tuple[Any, int]) -> None:
    channel, writer = pipe
    wait_readable(channel, 0.01)  # returns although nothing comes
    os.write(writer, b"x")
    wait_readable(channel, 3600.0)
    assert os.read(channel.number, 1) == b"x"
