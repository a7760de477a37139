"""When a backup to a bucket is due, what it is named, and which are removed: in virtual time."""

from __future__ import annotations

import pytest

from skyserve_cli.controller.backup.schedule import (
    FIRST_RETRY_S,
    LONGEST_RETRY_S,
    BackupState,
    Named,
    failed,
    is_due,
    name_of,
    newest_first,
    read_name,
    sentence_of,
    succeeded,
    superfluous,
    view_of,
)
from skyserve_cli.controller.notify.conditions import BACKUP, of_backup

NOW = 1_800_000_000.0
DAY_S = 86400.0
STATE = BackupState(NOW)


@pytest.mark.parametrize(
    ("state", "now", "due"),
    [
        pytest.param(STATE, NOW, True, id="the first is made at once"),
        pytest.param(succeeded(STATE, NOW), NOW + DAY_S - 1, False, id="not before a day is over"),
        pytest.param(succeeded(STATE, NOW), NOW + DAY_S, True, id="after a day"),
        pytest.param(succeeded(STATE, NOW), NOW - 5, True, id="the clock was set back"),
        pytest.param(failed(STATE, NOW, "x"), NOW + FIRST_RETRY_S - 1, False, id="a pause after a failure"),
        pytest.param(failed(STATE, NOW, "x"), NOW + FIRST_RETRY_S, True, id="tried again after it"),
        pytest.param(failed(STATE, NOW, "x"), NOW - 5, True, id="the clock was set back after a failure"),
        pytest.param(
            STATE._replace(failures=99, failed_at=NOW), NOW + LONGEST_RETRY_S, True, id="at least every hour"
        ),
    ],
)
def test_a_backup_is_due(state: BackupState, now: float, due: bool) -> None:
    assert is_due(state, now, DAY_S) is due


def test_a_bucket_that_is_away_for_ten_days_is_tried_about_every_hour() -> None:
    state, tries, now = succeeded(STATE, NOW), 0, NOW
    while now < NOW + 11 * DAY_S:
        now += 10.0
        if is_due(state, now, DAY_S):
            tries += 1
            state = failed(state, now, "away")
    assert 240 <= tries <= 250
    assert view_of(state, "s3://b", DAY_S, now) == {
        "to": "s3://b",
        "newest_at": NOW,
        "overdue": True,
        "why": "away",
    }
    assert view_of(succeeded(state, now), "s3://b", DAY_S, now)["overdue"] is False


def test_names_are_read_as_they_are_written() -> None:
    name = name_of("a1b2c3d4", NOW)
    assert name == "skyserve-a1b2c3d4-20270115T080000Z.backup"
    assert read_name(name) == Named(name, "a1b2c3d4", NOW)


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "skyserve-a1-20270115T080000Z.backup.part",
        "skyserve-a1-20271315T080000Z.backup",
        "skyserve-../x-20270115T080000Z.backup",
    ],
)
def test_other_objects_are_no_backups(name: str) -> None:
    assert read_name(name) is None


def test_all_but_the_newest_of_the_same_home_are_removed() -> None:
    ours = [name_of("a1", NOW + day * DAY_S) for day in range(5)]
    names = [ours[3], "notes.txt", ours[0], name_of("b2", NOW - DAY_S), ours[4], ours[1], ours[2]]
    assert superfluous(names, "a1", 3) == [ours[1], ours[0]]
    assert superfluous(names, "a1", 9) == []
    assert [named.name for named in newest_first(names)][:2] == [ours[4], ours[3]]
    assert newest_first(names)[-1].owner == "b2"


def test_an_old_backup_is_notified_of() -> None:
    view = view_of(failed(succeeded(STATE, NOW), NOW, "AccessDenied"), "s3://b", DAY_S, NOW + 2.5 * DAY_S)
    condition = of_backup({"backup": view}, NOW + 2.5 * DAY_S)["", BACKUP]
    assert condition.text == (
        "the newest backup is 2d 12h old in s3://b; the last attempt failed: AccessDenied"
    )
    none = view_of(STATE, "s3://b", DAY_S, NOW + 3 * DAY_S)
    assert "there is no backup in s3://b" in of_backup({"backup": none}, NOW + 3 * DAY_S)["", BACKUP].text
    fresh = view_of(succeeded(STATE, NOW), "s3://b", DAY_S, NOW + DAY_S)
    assert of_backup({"backup": fresh}, NOW) == of_backup({"backup": None}, NOW) == of_backup({}, NOW) == {}


def test_a_line_for_people() -> None:
    fine = view_of(succeeded(STATE, NOW), "s3://b/p", DAY_S, NOW)
    assert sentence_of(fine, "noon") == "newest backup: noon, in s3://b/p"
    wrong = view_of(failed(STATE, NOW, "NoSuchBucket"), "s3://b", DAY_S, NOW)
    assert sentence_of(wrong, "") == "no backup in s3://b yet; the last attempt failed: NoSuchBucket"
