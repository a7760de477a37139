"""The page of the metrics, from the code that exposes them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from lb.config.regions import PeerAgent, Regions
from lb.config.schema import Build, BuildKind, Table, Target
from lb.core.targets import TargetTable
from lb.observe.families import AGENT_HELP, OF_AGENT, OF_KEY, OF_KEY_AND_MODEL, OF_TARGET
from lb.observe.key_usage import UsageSum
from lb.observe.metrics import Metrics
from scripts.reference.text import NOTE, code, table
from skyserve_cli.controller.metrics.families import OF_CONTROLLER, OF_SERVICE, OF_TEAM
from skyserve_cli.engine.metrics import Telemetry
from skyserve_cli.engine.model import EngineModel
from skyserve_cli.engine.profiles import L4_8B
from skyserve_cli.engine.text import Language

_SUFFIX = {"counter": "_total"}


def page() -> str:
    """Returns the page in Markdown."""
    own = [metric for metric in agent() if metric.name.startswith("skyserve_")]
    parts = [
        NOTE,
        "# Metrics\n",
        "Every load balancer agent exposes Prometheus metrics at `GET /-/metrics` of its admin port, with the admin token. Histograms "
        "have the usual `_bucket`, `_sum` and `_count`. A `process_*` family reports CPU time, memory, start time and open files. "
        "With `service.load_balancer.metrics.target_label: true`, metrics of targets have a label `target` as well.\n",
        "## Load balancer\n",
        _rows(own),
        "## Controller\n",
        "The controller exposes these at `GET /metrics` of `controller.metrics_port` on 127.0.0.1, with the token in `metrics.token` in "
        "the home ([Operate services](../howto/operations.md#metrics-of-the-controller)).\n",
        _of_controller(),
        "## Simulated engine\n",
        "`serve engine` exposes the names of vLLM at `GET /metrics`.\n",
        _rows(engine()),
    ]
    return "\n".join(parts)


def agent() -> list[Metric]:
    """Returns the families of an agent that has served nothing."""
    metrics = Metrics("service", "region")
    peer = PeerAgent("peer", "other", "https://127.0.0.1:2", "peer")
    known = Regions("agent", "region", peers=(peer,))
    targets = Table("service", "1", (Target(id="a", url="http://127.0.0.1:1"),), regions=known)
    metrics.build = Build(BuildKind.NATIVE, fast_path=True)
    metrics.use_table(targets)
    metrics.of(targets.targets[0])
    metrics.of_key("key")
    metrics.used(UsageSum("key", "model", 0, 0, 0))
    metrics.peers.of("peer").forwards["arrival"] += 1
    regions = {
        "peers": [{"id": "peer", "rtt_ms": 1.0, "silent_s": 0.0, "egress_usd": 0.0}],
        "digests": [{"id": "peer", "sent_bytes": 0, "age_s": 0.0}],
        "refused_connections": {"expired": 1},
    }
    gauges = dict.fromkeys(AGENT_HELP, 0.0)
    text = metrics.expose(TargetTable(targets, 0.0), 0, 0.0, {}, gauges, regions)
    return list(text_string_to_metric_families(text.decode()))


def engine() -> list[Metric]:
    """Returns the families of a simulated engine that has served nothing."""
    text = Telemetry(EngineModel(L4_8B, Language()), "model").exposition()
    return list(text_string_to_metric_families(text.decode()))


def _of_controller() -> str:
    rows = [
        (code(one.name + _SUFFIX.get(one.type, "")), one.type, ", ".join(one.labels), one.help)
        for one in sorted((*OF_CONTROLLER, *OF_SERVICE, *OF_TEAM), key=lambda one: one.name)
    ]
    return table(["metric", "type", "labels", "meaning"], rows)


def _rows(families: Iterable[Metric]) -> str:
    rows = []
    for metric in sorted(families, key=lambda one: one.name):
        if metric.name.endswith("_created"):
            continue
        found = {label for sample in metric.samples for label in sample.labels} - {"le"}
        labels = sorted(found | _LABELS.get(metric.name, frozenset()), key=_place)
        name = metric.name + _SUFFIX.get(metric.type, "")
        rows.append((code(name), metric.type, ", ".join(labels), metric.documentation))
    return table(["metric", "type", "labels", "meaning"], rows)


def _labels() -> dict[str, frozenset[str]]:
    """Returns the labels of families that have no sample before something has happened."""
    target = frozenset({"service", "region", "zone", "capacity_type", "policy"})
    found = {
        f"skyserve_lb_engine_{name}": target
        for name in ("running_requests", "pending_requests", "kv_usage_ratio")
    }
    for families, base in (
        (OF_AGENT, frozenset({"service", "region", "policy"})),
        (OF_TARGET, target),
        (OF_KEY, frozenset({"service", "region", "key"})),
        (OF_KEY_AND_MODEL, frozenset({"service", "region", "key", "model"})),
    ):
        for one in families:
            found[f"skyserve_lb_{one.name}"] = base | ({one.kind} if one.kind else frozenset())
    return found


_LABELS = _labels()
_FIRST = ("service", "region", "zone", "capacity_type", "policy", "key", "model_name", "engine")


def _place(label: str) -> tuple[int, str]:
    return (_FIRST.index(label) if label in _FIRST else len(_FIRST), label)
