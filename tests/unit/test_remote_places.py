"""URLs of controllers on other hosts and in clusters."""

from __future__ import annotations

import getpass

import pytest

from skyserve_cli.controller.api.remote import KubernetesPlace, SshPlace

KINDS = {"ssh": SshPlace, "kubernetes": KubernetesPlace}
ME = getpass.getuser()


@pytest.mark.parametrize(
    ("url", "place", "written"),
    [
        ("ssh://ann@h:2222", SshPlace("ann", "h", 2222), "ssh://ann@h:2222"),
        ("ssh://h/", SshPlace(ME, "h", 22), f"ssh://{ME}@h"),
        ("ssh://a%40b@[::1]", SshPlace("a@b", "::1", 22), "ssh://a%40b@[::1]"),
        ("kubernetes://prod/ml", KubernetesPlace("prod", "ml"), "kubernetes://prod/ml"),
        ("kubernetes://a%2Fb/ml/", KubernetesPlace("a/b", "ml"), "kubernetes://a%2Fb/ml"),
    ],
)
def test_what_a_url_names(url: str, place: SshPlace | KubernetesPlace, written: str) -> None:
    assert KINDS[url.partition(":")[0]].of(url) == place
    assert place.url() == written


@pytest.mark.parametrize(
    "url",
    [
        "ssh://", "ssh://me@", "ssh://me@h/path", "ssh://me:secret@h", "ssh://h:0", "ssh://h?x", "ssh://h#x",
        "kubernetes://", "kubernetes:///ml", "kubernetes://prod", "kubernetes://prod/ML", "kubernetes://prod/ml/x",
        "kubernetes://prod/ml?x", "kubernetes://prod/ml#x",
    ],
)  # fmt: skip
def test_what_names_no_place(url: str) -> None:
    with pytest.raises(ValueError, match="://"):
        KINDS[url.partition(":")[0]].of(url)


@pytest.mark.parametrize(("kind", "url"), [("ssh", "kubernetes://prod/ml"), ("kubernetes", "ssh://h")])
def test_a_url_of_the_other_kind(kind: str, url: str) -> None:
    with pytest.raises(ValueError, match=url):
        KINDS[kind].of(url)
