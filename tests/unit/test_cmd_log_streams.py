"""The logs of several replicas as one, and the last line of each."""

from __future__ import annotations

import pytest
from rich.console import Console

from skyserve_cli.commands.log_streams import Growing, LastLines, PrefixedLog
from skyserve_cli.commands.progress import progress_table
from skyserve_cli.controller.api.client import ControllerDownError, RefusedError

MOST = 8  # bytes of a read


class Logs(dict[str, bytes]):
    """Logs by what the API calls them, read in small parts; one that is missing is refused."""

    is_away = False

    def read(self, log: str, offset: int) -> tuple[bytes, int]:
        if self.is_away:
            raise ControllerDownError("away")
        if log not in self:
            raise RefusedError(404, "no log is still kept")
        content = self[log][offset : offset + MOST]
        return content, offset + len(content)


def lines(found: list[bytes]) -> list[str]:
    return [line.decode() for line in found]


def test_a_line_is_printed_once_it_is_whole() -> None:
    log = PrefixedLog("3 | ")
    assert log.feed(b"loa") == []
    assert log.feed(b"ding\n\nser") == [b"3 | loading\n", b"3 | \n"]
    assert log.finish() == [b"3 | ser\n"]
    assert log.finish() == []


def test_replicas_that_start_join_and_those_that_end_are_read_to_their_end() -> None:
    logs = Logs({"replica/chat/9/0": b"one\ntwo\nhal", "replica/chat/10/0": b"first\n"})
    growing = Growing(logs.read, "chat", 0)
    assert lines(growing.step([9, 10])) == [" 9 | one\n", " 9 | two\n", "10 | first\n"]
    assert growing.step([9, 10]) == []
    logs["replica/chat/9/0"] += b"f\nlast words"
    logs["replica/chat/11/0"] = b"new\n"
    assert lines(growing.step([10, 11])) == [" 9 | half\n", " 9 | last words\n", "11 | new\n"]
    assert growing.step([10, 11]) == []


@pytest.mark.parametrize(
    ("tail", "shown"),
    [(0, []), (1, ["1 | c\n"]), (2, ["1 | b\n", "1 | c\n"]), (9, ["1 | a\n", "1 | b\n", "1 | c\n"])],
)
def test_a_tail_is_of_what_was_there(tail: int, shown: list[str]) -> None:
    logs = Logs({"replica/chat/1/0": b"a\nb\nc\n"})
    growing = Growing(logs.read, "chat", 0)
    assert lines(growing.step([1], tail=tail)) == shown
    logs["replica/chat/1/0"] += b"d\ne\nf\n"
    assert lines(growing.step([1])) == ["1 | d\n", "1 | e\n", "1 | f\n"]


def test_a_replica_whose_log_is_gone_stops_nothing() -> None:
    growing = Growing(Logs({"replica/chat/2/1": b"here\n"}).read, "chat", 1)
    assert lines(growing.step([1, 2])) == ["2 | here\n"]


def test_a_log_that_cannot_be_read_now_is_named_until_it_can() -> None:
    whole = Logs({"replica/chat/1/0": b"a\n", "replica/chat/2/0": b"b\n"})
    away = {"replica/chat/2/0"}

    def read(log: str, offset: int) -> tuple[bytes, int]:
        if log in away:
            raise RefusedError(503, "the cluster does not respond")
        return whole.read(log, offset)

    growing = Growing(read, "chat", 0)
    assert lines(growing.step([1, 2])) == ["1 | a\n"]
    assert growing.unread == {2: "the cluster does not respond"}
    away.clear()
    assert lines(growing.step([1, 2])) == ["2 | b\n"]
    assert growing.unread == {}


def test_the_last_line_of_a_log_that_grows() -> None:
    logs = Logs({"a": b"downloading the model\n====\n"})
    last = LastLines(logs.read)
    last.follow(["a", "b"])
    assert last.line("a") == ""
    last.step()
    assert (last.line("a"), last.line("b")) == ("downloading the model", "")
    logs["a"] += b"loading shard 3 of 8\n"
    logs.is_away = True
    last.step()
    assert last.line("a") == "downloading the model"
    logs.is_away = False
    last.step()
    assert last.line("a") == "loading shard 3 of 8"


def test_a_log_is_shown_under_each_replica_that_starts() -> None:
    def replica(number: int, state: str) -> dict[str, object]:
        return {
            "id": number, "state": state, "cloud": "sky", "region": "east", "zone": "east-a", "capacity_type": "spot", "since": 0.0,
        }  # fmt: skip

    states = ["READY", "STARTING", "STARTING", "STARTING", "GONE"]
    view = {"name": "chat", "replicas": [replica(number, state) for number, state in enumerate(states, 1)]}
    said = {
        "replica/chat/1": "serving",
        "replica/chat/2": "shard 3 of 8 " * 10,
        "replica/chat/4": "\x1b[2Jpip",
    }
    console = Console(width=60)
    with console.capture() as capture:
        console.print(progress_table([view], 60.0, lambda log: said.get(log, "")))
    assert [line.rstrip() for line in capture.get().splitlines()] == [
        "REPLICA  STATE     ZONE             CAPACITY  SINCE",
        "chat/1   READY     sky/east/east-a  spot      1m",
        "chat/2   STARTING  sky/east/east-a  spot      1m",
        "  | " + ("shard 3 of 8 " * 10)[:55] + "\N{HORIZONTAL ELLIPSIS}",
        "chat/3   STARTING  sky/east/east-a  spot      1m",
        "chat/4   STARTING  sky/east/east-a  spot      1m",
        "  | \N{REPLACEMENT CHARACTER}[2Jpip",
    ]
