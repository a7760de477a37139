"""From the nodes of a cluster, and the pools that config.yaml names, to offers. Pure.

A zone is offered if a node of it could hold the Pod when it is empty. What other Pods take now is found by the scheduler, in
milliseconds: a full zone is a CapacityError of the launch, as on every cloud.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from policies.model import CapacityType, Offer, Role, Zone
from provisioners.kubernetes import placement
from provisioners.kubernetes.errors import CLOUD
from provisioners.kubernetes.node_state import Node, is_announced, is_ready
from provisioners.kubernetes.prices import usd_hour
from provisioners.kubernetes.quantities import amount
from provisioners.kubernetes.settings import Cluster
from provisioners.kubernetes.translate import Size, size_of
from provisioners.offers.explain_no_offer import NoOffer
from provisioners.offers.matching import each_once, ranked_by
from provisioners.port.accelerator_names import canonical
from provisioners.port.base import Candidate, Requirements

_CPUS, _GB_PER_CPU = 2.0, 2.0  # of a Pod without accelerators, where the service file does not say
_CPUS_PER_GPU, _GB_PER_GPU = 4.0, 16.0
_AGENT_SIZE = "1cpu-1gb"  # of a load balancer
_SHARE = 0.9  # of a node that one Pod may request unasked: system Pods need the rest


@dataclass(frozen=True, slots=True)
class NodeShape:
    """A node, or a kind of node that a pool makes when it is needed (`is_elastic`)."""

    zone: str
    accelerator: str  # "" for none
    count: int
    cpus: float
    memory_gb: float
    is_spot: bool
    node_type: str = ""
    accelerator_labels: tuple[tuple[str, str], ...] = ()
    is_elastic: bool = False


def shapes_of(nodes: Iterable[Node], cluster: Cluster) -> list[NodeShape]:
    """Return the nodes that take Pods of ours, and the pools of the configuration."""
    found = [shape for node in nodes if (shape := _shape(node, cluster)) is not None]
    for pool in cluster.pools:
        named, labels = placement.accelerator_of(pool.labels)
        accelerator = canonical(pool.accelerator) if pool.accelerator else named
        found.append(
            NodeShape(
                pool.zone,
                accelerator,
                pool.count if accelerator else 0,
                pool.cpus,
                pool.memory_gb,
                pool.spot,
                pool.labels.get(placement.TYPE_LABEL, ""),
                labels or (tuple(pool.labels.items()) if accelerator else ()),
                is_elastic=True,
            )
        )
    return found


def _shape(node: Node, cluster: Cluster) -> NodeShape | None:
    meta, spec = node["metadata"], node.get("spec") or {}
    labels: Mapping[str, str] = meta.get("labels") or {}
    if spec.get("unschedulable") or not is_ready(node):
        return None
    if any(labels.get(key) != value for key, value in cluster.node_selector.items()):
        return None
    has = (node.get("status") or {}).get("allocatable") or {}
    names = [cluster.gpu_resource] if cluster.gpu_resource else placement.RESOURCES
    resource = next((name for name in names if amount(has.get(name))), "")
    accelerator, by = placement.accelerator_of(labels) if resource else ("", ())
    if resource and not accelerator:
        return None  # nothing says of which kind they are
    is_spot = placement.is_spot(labels)
    market = CapacityType.SPOT if is_spot else CapacityType.ON_DEMAND
    accepted = placement.tolerations(market, resource, cluster.tolerations)
    for taint in spec.get("taints") or ():
        if taint.get("effect") == "NoSchedule" and not placement.tolerates(taint, accepted):
            return None
    return NodeShape(
        labels.get(placement.ZONE_LABEL, placement.NO_ZONE),
        accelerator,
        int(amount(has.get(resource))) if resource else 0,
        amount(has.get("cpu")),
        amount(has.get("memory")) / 1e9,
        is_spot,
        labels.get(placement.TYPE_LABEL, ""),
        by,
    )


def cordoned(nodes: Iterable[Node]) -> list[str]:
    """Return the nodes that take no new Pods, or announce that they go."""
    return [
        node["metadata"]["name"]
        for node in nodes
        if (node.get("spec") or {}).get("unschedulable") or is_announced(node)
    ]


def accelerator_labels(shapes: Iterable[NodeShape], accelerator: str | None) -> list[tuple[str, str]]:
    """Return the labels of nodes that have the accelerator."""
    wanted = canonical(accelerator) if accelerator else ""
    if not wanted:
        return []
    return sorted({label for one in shapes if one.accelerator == wanted for label in one.accelerator_labels})


def has_node(offer: Offer, shapes: Iterable[NodeShape]) -> bool:
    """Return whether a node that takes Pods now could hold one of the offer when it is empty."""
    size, is_spot = size_of(offer.instance_type), offer.capacity_type is CapacityType.SPOT
    name = canonical(offer.accelerator) if offer.accelerator else ""
    return any(
        shape.zone == offer.zone.name
        and shape.is_spot == is_spot
        and (not name or (shape.accelerator == name and shape.count >= offer.accelerator_count))
        and shape.cpus >= size.cpus
        and shape.memory_gb >= size.memory_gb
        for shape in shapes
    )


def offers_of(need: Requirements, clusters: Sequence[tuple[Cluster, Sequence[NodeShape]]]) -> list[Offer]:
    """Return an offer for each zone that fits a candidate, cheapest first; with `need.ordered`, in the order of the candidates.

    Those for load balancers are of clusters that have an image for them.
    """
    if need.role is Role.LOAD_BALANCER:
        clusters = [(cluster, shapes) for cluster, shapes in clusters if cluster.agent_image is not None]
        candidates = tuple(
            replace(one, instance_type=one.instance_type or _AGENT_SIZE) for one in need.candidates
        )
        need = replace(need, candidates=candidates)
    groups = [
        sorted(
            (
                offer
                for cluster, shapes in clusters
                for offer in _offers(candidate, cluster, shapes, need.num_nodes)
            ),
            key=ranked_by(need.work),
        )
        for candidate in need.candidates
    ]
    offers = each_once(offer for group in groups for offer in group)
    return offers if need.ordered else sorted(offers, key=ranked_by(need.work))


def _offers(
    candidate: Candidate, cluster: Cluster, shapes: Sequence[NodeShape], num_nodes: int
) -> Iterator[Offer]:
    if not _is_in(candidate.cloud, CLOUD) or not cluster.is_meant(candidate.region):
        return
    market = CapacityType.SPOT if candidate.use_spot else CapacityType.ON_DEMAND
    count = candidate.accelerator_count if candidate.accelerator else 0.0
    name = canonical(candidate.accelerator) if candidate.accelerator else None
    price = usd_hour(cluster.prices, name, count, market)
    on_demand = usd_hour(cluster.prices, name, count, CapacityType.ON_DEMAND)
    if candidate.max_hourly_cost is not None and price > candidate.max_hourly_cost:
        return
    by_zone: dict[str, list[tuple[Size, NodeShape]]] = {}
    for shape in shapes:
        size = _fit(candidate, shape)
        if size is not None and _is_in(candidate.zone, shape.zone):
            by_zone.setdefault(shape.zone, []).append((size, shape))
    for zone, fitting in sorted(by_zone.items()):
        size = min((one for one, _ in fitting), key=lambda one: (one.cpus, one.memory_gb, one.node_type))
        yield Offer(
            zone=Zone(CLOUD, cluster.region, zone),
            instance_type=str(size),
            accelerator=name,
            accelerator_count=count,
            capacity_type=market,
            price_usd_hour=round(price * num_nodes, 6),
            on_demand_usd_hour=round(on_demand * num_nodes, 6),
            choice=candidate.choice,
            places=_places([shape for _, shape in fitting], count, num_nodes),
        )


def _fit(candidate: Candidate, shape: NodeShape) -> Size | None:
    """Return what a Pod for the candidate would request of such a node; None if it does not fit."""
    if candidate.use_spot != shape.is_spot:
        return None
    count = candidate.accelerator_count if candidate.accelerator else 0.0
    if candidate.accelerator and (
        shape.accelerator != canonical(candidate.accelerator) or shape.count < count
    ):
        return None
    asked = _given(candidate.instance_type)
    try:
        size = size_of(asked) if asked is not None else None
    except ValueError:
        if asked != shape.node_type:
            return None
        size = None
    if size is None:
        size = _usual(candidate, shape, count, asked or "")
    if size.cpus > shape.cpus or size.memory_gb > shape.memory_gb:
        return None
    return size


def _usual(candidate: Candidate, shape: NodeShape, count: float, node_type: str) -> Size:
    gpus = math.ceil(count)
    share = _SHARE * (gpus / shape.count if gpus and shape.count else 1.0)
    cpus = _number(candidate.cpus)
    if cpus is None:
        cpus = min(_CPUS_PER_GPU * gpus if gpus else _CPUS, _round_down(shape.cpus * share))
    wish = candidate.memory or ""
    memory = _number(wish)
    if memory is not None and wish.endswith("x"):
        memory *= cpus
    if memory is None:
        usual = _GB_PER_GPU * gpus if gpus else _GB_PER_CPU * cpus
        memory = min(usual, _round_down(shape.memory_gb * share))
    return Size(cpus, memory, node_type)


def _places(shapes: Sequence[NodeShape], count: float, num_nodes: int) -> int | None:
    """Return how many replicas the nodes hold when they are empty; None if there may be more nodes, or GPUs are no limit."""
    if not count or any(one.is_elastic for one in shapes):
        return None
    return sum(one.count // math.ceil(count) for one in shapes) // num_nodes


def explain_no_offer(
    candidate: Candidate, clusters: Sequence[tuple[Cluster, Sequence[NodeShape]]]
) -> NoOffer | None:
    """Return which wish of the candidate left nothing; None if it has an offer, or the reason is unknown."""
    if next((o for cluster, shapes in clusters for o in _offers(candidate, cluster, shapes, 1)), None):
        return None
    meant = [(cluster, shapes) for cluster, shapes in clusters if cluster.is_meant(candidate.region)]
    if not meant:
        names = ", ".join(cluster.region for cluster, _ in clusters) or "none"
        return NoOffer("region", f"config.yaml has no cluster {candidate.region!r}", f"it has {names}")
    shapes = [shape for _, each in meant for shape in each]
    if not shapes:
        return NoOffer(
            "cloud", "the cluster lists no nodes", "name its pools under clouds.kubernetes.contexts"
        )
    if not any(shape.is_spot == candidate.use_spot for shape in shapes):
        kind = "spot nodes" if candidate.use_spot else "nodes that are not spot"
        return NoOffer(
            "use_spot", f"the cluster has no {kind}", f"set use_spot: {str(not candidate.use_spot).lower()}"
        )
    zones = sorted({shape.zone for shape in shapes})
    if _given(candidate.zone) not in (None, *zones):
        return NoOffer("zone", f"the cluster has no zone {candidate.zone!r}", f"it has {', '.join(zones)}")
    if candidate.accelerator:
        name = canonical(candidate.accelerator)
        same = [shape.count for shape in shapes if shape.accelerator == name]
        if not same:
            known = sorted({shape.accelerator for shape in shapes if shape.accelerator})
            return NoOffer("accelerator", f"no node has {name}", f"they have {', '.join(known) or 'none'}")
        if max(same) < candidate.accelerator_count:
            return NoOffer(
                "accelerator_count",
                f"no node has {candidate.accelerator_count:g} {name}",
                f"the most is {max(same)}",
            )
    return None


def _number(wish: str | None) -> float | None:
    try:
        return float((wish or "").rstrip("+x"))
    except ValueError:
        return None


def _round_down(number: float) -> float:
    """To a tenth: sizes are names, and people read them."""
    return max(0.1, math.floor(number * 10) / 10)


def _given(wish: str | None) -> str | None:
    return None if wish in (None, "*") else wish


def _is_in(wish: str | None, name: str) -> bool:
    return _given(wish) in (None, name)
