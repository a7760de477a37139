"""The panels of the Grafana boards: a table per board. `scripts.boards` writes the boards."""

from __future__ import annotations

from typing import NamedTuple

_OF = '{service=~"$service"}'


class Panel(NamedTuple):
    """A graph over time: (expression, legend) per line. `unit` is Grafana's name of it."""

    title: str
    lines: tuple[tuple[str, str], ...]
    unit: str = "short"


def _rate(name: str, *by: str) -> str:
    """Return a rate per second over 2 minutes, summed by the service and these labels."""
    return f"sum by ({', '.join(('service', *by))}) (rate(skyserve_lb_{name}{_OF}[2m]))"


def _quantile(share: float, name: str) -> str:
    return f"histogram_quantile({share}, {_rate(f'{name}_bucket', 'le')})"


def _quantiles(name: str, *shares: float) -> tuple[tuple[str, str], ...]:
    return tuple((_quantile(share, name), f"{{{{service}}}} p{share * 100:g}") for share in shares)


def _sum(name: str, *by: str) -> str:
    return f"sum by ({', '.join(('service', *by))}) (skyserve_lb_{name}{_OF})"


SERVICES = (
    Panel(
        "Replicas: ready, wanted, with overprovisioned ones",
        (
            (f"skyserve_service_ready_replicas{_OF}", "{{service}} ready"),
            (f"skyserve_service_wanted_replicas{_OF}", "{{service}} wanted"),
            (f"skyserve_service_target_replicas{_OF}", "{{service}} target"),
        ),
    ),
    Panel(
        "Replicas by state",
        (
            (
                f"sum by (service, state, capacity_type) (skyserve_service_replicas{_OF})",
                "{{service}} {{state}} {{capacity_type}}",
            ),
        ),
    ),
    Panel(
        "Ready replicas by zone",
        (
            (
                f"skyserve_service_ready_replicas_by_zone{_OF}",
                "{{service}} {{cloud}} {{region}} {{zone}}",
            ),
        ),
    ),
    Panel(
        "Price per hour",
        (
            (f"skyserve_service_usd_per_hour{_OF}", "{{service}}"),
            (f"skyserve_service_on_demand_usd_per_hour{_OF}", "{{service}} on demand"),
            (f"skyserve_service_load_balancers_usd_per_hour{_OF}", "{{service}} load balancers"),
        ),
        "currencyUSD",
    ),
    Panel(
        "Spent",
        (
            (f"skyserve_service_usd_total{_OF}", "{{service}}"),
            (f"skyserve_service_on_demand_usd_total{_OF}", "{{service}} on demand"),
        ),
        "currencyUSD",
    ),
    Panel("Requests", ((f"skyserve_service_requests_per_second{_OF}", "{{service}}"),), "reqps"),
    Panel(
        "Requests on replicas and waiting, loaded replicas",
        (
            (f"skyserve_service_in_flight_requests{_OF}", "{{service}} on replicas"),
            (f"skyserve_service_queued_requests{_OF}", "{{service}} waiting"),
            (f"skyserve_service_loaded_replicas{_OF}", "{{service}} loaded replicas"),
        ),
    ),
    Panel("Demand and its forecast", ((f"skyserve_demand_forecast{_OF}", "{{service}} {{of}}"),), "reqps"),
    Panel(
        "Requests within the SLO",
        (
            (f"skyserve_slo_attainment{_OF}", "{{service}} in 24 hours"),
            (f"skyserve_slo_attainment_asked{_OF}", "{{service}} asked"),
        ),
        "percentunit",
    ),
    Panel(
        "Headroom and size of requests",
        (
            (f"skyserve_headroom{_OF}", "{{service}} headroom"),
            (f"skyserve_work_per_request{_OF}", "{{service}} work per request"),
        ),
    ),
    Panel(
        "Versions",
        (
            (f"skyserve_service_version{_OF}", "{{service}} newest"),
            (f"skyserve_service_serving_version{_OF}", "{{service}} serving"),
            (f"skyserve_service_version_given_up{_OF}", "{{service}} given up"),
        ),
    ),
    Panel(
        "Load balancers",
        (
            (f"skyserve_service_load_balancers_alive{_OF}", "{{service}} alive"),
            (f"skyserve_service_load_balancers_behind{_OF}", "{{service}} behind"),
        ),
    ),
)

LOAD_BALANCERS = (
    Panel("Requests", ((_rate("requests_total"), "{{service}}"),), "reqps"),
    Panel("Responses by status", ((_rate("responses_total", "code"), "{{service}} {{code}}"),), "reqps"),
    Panel(
        "Requests that failed, by error",
        ((_rate("request_errors_total", "code"), "{{service}} {{code}}"),),
        "reqps",
    ),
    Panel("Time to first token", _quantiles("time_to_first_token_seconds", 0.5, 0.9, 0.99), "s"),
    Panel("Between two tokens of a stream", _quantiles("inter_token_seconds", 0.5, 0.9, 0.99), "s"),
    Panel(
        "From arrival to the end of the response", _quantiles("request_duration_seconds", 0.5, 0.9, 0.99), "s"
    ),
    Panel(
        "Tokens per second",
        (
            (_rate("input_tokens_total"), "{{service}} prompts"),
            (_rate("output_tokens_total"), "{{service}} responses"),
        ),
    ),
    Panel(
        "Share of prompts expected in the cache",
        ((f"{_rate('matched_prompt_bytes_total')} / ({_rate('prompt_bytes_total')} > 0)", "{{service}}"),),
        "percentunit",
    ),
    Panel(
        "Requests waiting for a target, and on targets",
        (
            (_sum("held_requests"), "{{service}} waiting"),
            (_sum("in_flight_requests", "region", "zone"), "{{service}} on targets {{region}} {{zone}}"),
        ),
    ),
    Panel(
        "Requests in engines",
        (
            (_sum("engine_running_requests"), "{{service}} running"),
            (_sum("engine_pending_requests"), "{{service}} pending"),
        ),
    ),
    Panel(
        "KV cache in use",
        ((f"avg by (service) (skyserve_lb_engine_kv_usage_ratio{_OF})", "{{service}}"),),
        "percentunit",
    ),
    Panel("Targets by standing", ((_sum("targets_by_standing", "standing"), "{{service}} {{standing}}"),)),
    Panel(
        "Attempts beyond the first, and targets left out",
        (
            (_rate("retries_total"), "{{service}} retries"),
            (_rate("ejections_total"), "{{service}} ejections"),
        ),
        "ops",
    ),
    Panel(
        "Broken streams",
        (
            (_rate("continuations_total"), "{{service}} continued"),
            (_rate("handovers_total"), "{{service}} handed over in time"),
            (_rate("cut_streams_total"), "{{service}} cut"),
        ),
        "ops",
    ),
    Panel(
        "Requests turned away",
        (
            (_rate("rejected_requests_total"), "{{service}} no target"),
            (_rate("limited_requests_total"), "{{service}} limits of their key"),
            (_rate("unauthorized_requests_total"), "{{service}} no known key"),
        ),
        "reqps",
    ),
    Panel("Open connections of clients", ((_sum("client_connections"), "{{service}}"),)),
    Panel(
        "Bytes kept of requests and streams",
        (
            (_sum("buffered_bytes"), "{{service}} requests"),
            (_sum("stream_bytes"), "{{service}} streams"),
            (_sum("buffer_limit_bytes"), "{{service}} limit"),
        ),
        "bytes",
    ),
    Panel("Lag of the event loop", _quantiles("loop_lag_seconds", 0.99), "s"),
)

FLEET = (
    Panel(
        "Price per hour of all services",
        (
            ("sum(skyserve_service_usd_per_hour)", "replicas"),
            ("sum(skyserve_service_on_demand_usd_per_hour)", "the same on demand"),
            ("sum(skyserve_service_load_balancers_usd_per_hour)", "load balancers"),
        ),
        "currencyUSD",
    ),
    Panel(
        "Share saved against on demand",
        (
            (
                "1 - sum(skyserve_service_usd_total) / sum(skyserve_service_on_demand_usd_total)",
                "since the services were started",
            ),
        ),
        "percentunit",
    ),
    Panel(
        "Spent per day",
        (
            ("sum(rate(skyserve_service_usd_total[2m])) * 86400", "spent"),
            ("sum(rate(skyserve_service_on_demand_usd_total[2m])) * 86400", "the same on demand"),
        ),
        "currencyUSD",
    ),
    Panel(
        "Replicas of all services",
        (
            ("sum(skyserve_service_ready_replicas)", "ready"),
            ("sum(skyserve_service_wanted_replicas)", "wanted"),
        ),
    ),
    Panel(
        "Replicas by market", (("sum by (capacity_type) (skyserve_service_replicas)", "{{capacity_type}}"),)
    ),
    Panel(
        "Ready replicas by place",
        (
            (
                "sum by (cloud, region, zone) (skyserve_service_ready_replicas_by_zone)",
                "{{cloud}} {{region}} {{zone}}",
            ),
        ),
    ),
    Panel(
        "Replicas that are missing",
        (
            (
                "clamp_min(skyserve_service_wanted_replicas - skyserve_service_ready_replicas, 0)",
                "{{service}}",
            ),
        ),
    ),
    Panel(
        "Requests of all services",
        (("sum(skyserve_service_requests_per_second)", "arriving"),),
        "reqps",
    ),
    Panel(
        "Controller",
        (
            ("skyserve_controller_leads", "{{instance}} leads"),
            ("skyserve_controller_store_ok", "{{instance}} store ok"),
            ("skyserve_controller_lease_epoch", "{{instance}} lease epoch"),
        ),
    ),
    Panel(
        "Time since the controller started", (("skyserve_controller_uptime_seconds", "{{instance}}"),), "s"
    ),
    Panel(
        "Time since the state was last good",
        (("time() - skyserve_controller_store_good_timestamp_seconds", "{{instance}}"),),
        "s",
    ),
    Panel(
        "Age of the newest backup",
        (("time() - skyserve_controller_backup_timestamp_seconds", "{{instance}}"),),
        "s",
    ),
)
