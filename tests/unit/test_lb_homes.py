"""Which target has what an id names: learned, looked up by API key, bounded in memory and age."""

from __future__ import annotations

from lb.core.homes import Homes


def test_what_was_learned_is_found() -> None:
    homes = Homes()
    homes.learn("", "resp_1", "a", 0.0)
    assert homes.find("", "resp_1", 1.0) == "a"
    assert homes.find("", "resp_2", 1.0) is None


def test_the_last_target_that_was_seen_with_it_counts() -> None:
    homes = Homes()
    homes.learn("", "resp_1", "a", 0.0)
    homes.learn("", "resp_1", "b", 1.0)
    assert homes.find("", "resp_1", 1.0) == "b"
    assert len(homes) == 1


def test_another_key_neither_sees_nor_replaces_it() -> None:
    homes = Homes()
    homes.learn("alice", "resp_1", "a", 0.0)
    assert homes.find("mallory", "resp_1", 0.0) is None
    homes.learn("mallory", "resp_1", "b", 0.0)
    assert homes.find("alice", "resp_1", 0.0) == "a"


def test_old_ones_are_forgotten() -> None:
    homes = Homes(max_age_s=10.0)
    homes.learn("", "resp_1", "a", 0.0)
    assert homes.find("", "resp_1", 10.0) == "a"
    assert homes.find("", "resp_1", 10.1) is None
    assert (len(homes), homes.size_bytes) == (0, 0)


def test_beyond_its_memory_it_forgets_what_was_used_longest_ago() -> None:
    homes = Homes(max_bytes=2000)
    for number in range(3):
        homes.learn("", f"resp_{number}", "a", 0.0)
    homes.find("", "resp_0", 0.0)
    for number in range(3, 7):
        homes.learn("", f"resp_{number}", "a", 0.0)
    assert homes.size_bytes <= 2000
    assert homes.find("", "resp_0", 0.0) == "a"
    assert homes.find("", "resp_1", 0.0) is None
    assert homes.find("", "resp_6", 0.0) == "a"


def test_its_size_is_that_of_what_it_holds() -> None:
    homes = Homes()
    for name in ("resp_1", "resp_22", "resp_1"):
        homes.learn("t", name, "a" * len(name), 0.0)
    for _ in range(2):
        homes.learn("t", "resp_22", "b", 0.0)
    other = Homes()
    other.learn("t", "resp_1", "a" * 6, 0.0)
    other.learn("t", "resp_22", "b", 0.0)
    assert homes.size_bytes == other.size_bytes > 0
