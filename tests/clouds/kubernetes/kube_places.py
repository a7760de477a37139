"""Clusters on which the same tests run: the fake, whose kubelet looks around all the time, and the one that $KUBECONFIG names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from time import time

from tests.clouds.kubernetes.kube_server import serving
from tests.clouds.kubernetes.kube_world import KubeWorld


@contextmanager
def living(
    folder: Path, *, token: str = "", pods: int = 110, nodes: Sequence[str] = ("a", "b", "c", "d")
) -> Iterator[tuple[KubeWorld, Path]]:
    """A fake cluster in real time, and its kubeconfig."""
    root = folder / "cluster"
    root.mkdir()
    world = KubeWorld(root, time)
    world.troubles.token = token
    for name in nodes:
        world.add_node(name, "zone-a", pods=pods)
    over = Event()

    def look() -> None:
        while not over.wait(0.1):
            world.look()

    with serving(world) as server:
        kubelet = Thread(target=look)
        kubelet.start()
        try:
            yield world, server.kubeconfig(folder / "kubeconfig")
        finally:
            over.set()
            kubelet.join()
