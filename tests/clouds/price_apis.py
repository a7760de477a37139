"""The price APIs of the three clouds on loopback: their shapes as documented, a world of prices that a test sets.

Every request is checked; one that the real API would refuse is refused here, too. `trouble` is what the next
responses are instead: (HTTP status, headers), in order.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

GCP_KEY = "a-key-of-the-test"
_AZURE_FILTER = re.compile(
    r"serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and armSkuName eq '(Standard_\w+)'"
)
_EC2 = "http://ec2.amazonaws.com/doc/2016-11-15/"


def meter(name: str, region: str, price: float, *, spot: bool = False, **others: Any) -> dict[str, Any]:
    """An item of Azure's Retail Prices API."""
    short = name.removeprefix("Standard_").replace("_", " ")
    said = f"{short} Spot" if spot else short
    return {
        "currencyCode": "USD",
        "tierMinimumUnits": 0.0,
        "retailPrice": price,
        "unitPrice": price,
        "armRegionName": region,
        "location": region,
        "effectiveStartDate": "2026-10-01T00:00:00Z",
        "meterName": said,
        "skuName": said,
        "productName": f"Virtual Machines {short} Series",
        "serviceName": "Virtual Machines",
        "serviceFamily": "Compute",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "isPrimaryMeterRegion": True,
        "armSkuName": name,
        **others,
    }


def sku(
    description: str,
    price: float,
    regions: list[str],
    *,
    unit: str = "h",
    spot: bool = False,
    **category: str,
) -> dict[str, Any]:
    """A SKU of Google's Cloud Billing catalog."""
    units = int(price)
    return {
        "description": description,
        "category": {
            "serviceDisplayName": "Compute Engine",
            "resourceFamily": "Compute",
            "usageType": "Preemptible" if spot else "OnDemand",
            **category,
        },
        "serviceRegions": regions,
        "pricingInfo": [
            {
                "pricingExpression": {
                    "usageUnit": unit,
                    "displayQuantity": 1,
                    "tieredRates": [
                        {
                            "startUsageAmount": 0,
                            "unitPrice": {
                                "currencyCode": "USD",
                                "units": str(units),
                                "nanos": round((price - units) * 1e9),
                            },
                        }
                    ],
                },
                "currencyConversionRate": 1,
            }
        ],
    }


def product(name: str, region: str, price: float, unit: str = "Hrs", **attributes: str) -> dict[str, Any]:
    """An entry of AWS's price list."""
    return {
        "product": {
            "productFamily": "Compute Instance",
            "attributes": {
                "instanceType": name,
                "regionCode": region,
                "operatingSystem": "Linux",
                **attributes,
            },
        },
        "serviceCode": "AmazonEC2",
        "terms": {
            "OnDemand": {
                "SKU.TERM": {
                    "priceDimensions": {
                        "SKU.TERM.RATE": {"unit": unit, "pricePerUnit": {"USD": f"{price:.10f}"}}
                    }
                }
            }
        },
    }


@dataclass
class PriceWorld:
    """What the APIs say. Spot prices of AWS are (region, zone name, zone id, type) -> [(time, price)]."""

    meters: list[dict[str, Any]] = field(default_factory=list)
    skus: list[dict[str, Any]] = field(default_factory=list)
    products: list[dict[str, Any]] = field(default_factory=list)
    spot: dict[tuple[str, str, str, str], list[tuple[str, float]]] = field(default_factory=dict)
    open_regions: list[str] = field(default_factory=list)
    page: int = 2
    says_zone_ids: bool = True
    trouble: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    garbage: bytes | None = None
    calls: list[str] = field(default_factory=list)
    url: str = ""


class _Refused(Exception):
    """HTTP 400 and why."""


@contextmanager
def price_world() -> Iterator[PriceWorld]:
    world = PriceWorld()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
            world.calls.append(parts.path)
            if self._is_troubled():
                return
            try:
                if parts.path == "/api/retail/prices":
                    self._json(_azure(world, query))
                elif parts.path == "/v1/services/6F81-5844-456A/skus":
                    if query.get("key") != GCP_KEY:
                        self._send(403, b'{"error": {"code": 403, "status": "PERMISSION_DENIED"}}')
                        return
                    self._json(_google(world, query))
                else:
                    self._send(404, b"{}")
            except _Refused as error:
                self._send(400, json.dumps({"error": str(error)}).encode())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            target = self.headers.get("X-Amz-Target", "")
            region = self.headers["Authorization"].split("Credential=")[1].split("/")[2]
            if target:
                world.calls.append(target)
                self._json(_products(world, json.loads(body)), "application/x-amz-json-1.1")
                return
            form = {key: values[0] for key, values in parse_qs(body.decode()).items()}
            world.calls.append(f"{form['Action']} {region}")
            self._send(200, _ec2(world, form, region).encode(), "text/xml")

        def _is_troubled(self) -> bool:
            if world.garbage is not None:
                self._send(200, world.garbage)
                return True
            if not world.trouble:
                return False
            status, headers = world.trouble.pop(0)
            self._send(status, b"{}", **headers)
            return True

        def _json(self, value: object, kind: str = "application/json") -> None:
            self._send(200, json.dumps(value).encode(), kind)

        def _send(self, status: int, content: bytes, kind: str = "application/json", **headers: str) -> None:
            self.send_response(status)
            for key, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    world.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield world
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _azure(world: PriceWorld, query: dict[str, str]) -> dict[str, Any]:
    wanted = _AZURE_FILTER.fullmatch(query.get("$filter", ""))
    if wanted is None or query.get("api-version") != "2023-01-01-preview":
        raise _Refused(f"the filter {query} is none")
    items = [item for item in world.meters if item["armSkuName"] == wanted[1]]
    skip = int(query.get("$skip", 0))
    shown = items[skip : skip + world.page]
    following = None
    if skip + world.page < len(items):
        # The real API names its own address, whichever way it was reached.
        rest = f"api-version={query['api-version']}&$filter={query['$filter'].replace(' ', '%20')}"
        following = f"https://prices.invalid/api/retail/prices?{rest}&$skip={skip + world.page}"
    return {"BillingCurrency": "USD", "Items": shown, "NextPageLink": following, "Count": len(shown)}


def _google(world: PriceWorld, query: dict[str, str]) -> dict[str, Any]:
    if query.get("currencyCode") != "USD" or not 0 < int(query.get("pageSize", 0)) <= 5000:
        raise _Refused(f"{query} is no list of SKUs")
    skip = int(query.get("pageToken") or 0)
    more = skip + world.page < len(world.skus)
    return {
        "skus": world.skus[skip : skip + world.page],
        "nextPageToken": str(skip + world.page) if more else "",
    }


def _products(world: PriceWorld, body: dict[str, Any]) -> dict[str, Any]:
    assert body["ServiceCode"] == "AmazonEC2"
    wanted = {each["Field"]: each["Value"] for each in body["Filters"] if each["Type"] == "TERM_MATCH"}
    assert wanted["operatingSystem"] == "Linux"
    assert wanted["tenancy"] == "Shared"
    found = [
        each
        for each in world.products
        if each["product"]["attributes"]["instanceType"] == wanted["instanceType"]
    ]
    skip = int(body.get("NextToken", 0))
    answer: dict[str, Any] = {
        "FormatVersion": "aws_v1",
        "PriceList": [json.dumps(each) for each in found[skip : skip + world.page]],
    }
    return answer | ({"NextToken": str(skip + world.page)} if skip + world.page < len(found) else {})


def _ec2(world: PriceWorld, form: dict[str, str], region: str) -> str:
    action = form["Action"]
    if action == "DescribeRegions":
        items = "".join(f"<item><regionName>{each}</regionName></item>" for each in world.open_regions)
        inner = f"<regionInfo>{items}</regionInfo>"
    elif action == "DescribeAvailabilityZones":
        zones = {(name, zone_id) for where, name, zone_id, _ in world.spot if where == region}
        items = "".join(
            f"<item><zoneName>{name}</zoneName><zoneId>{zone_id}</zoneId></item>" for name, zone_id in zones
        )
        inner = f"<availabilityZoneInfo>{items}</availabilityZoneInfo>"
    else:
        assert action == "DescribeSpotPriceHistory", action
        assert form["ProductDescription.1"] == "Linux/UNIX"
        asked = {value for key, value in form.items() if key.startswith("InstanceType.")}
        items = "".join(
            f"<item><instanceType>{kind}</instanceType><productDescription>Linux/UNIX</productDescription>"
            f"<spotPrice>{price:.6f}</spotPrice><timestamp>{at}</timestamp>"
            f"<availabilityZone>{name}</availabilityZone>"
            + (f"<availabilityZoneId>{zone_id}</availabilityZoneId>" if world.says_zone_ids else "")
            + "</item>"
            for (where, name, zone_id, kind), history in world.spot.items()
            for at, price in history
            if where == region and kind in asked
        )
        inner = f"<spotPriceHistorySet>{items}</spotPriceHistorySet>"
    return f'<{action}Response xmlns="{_EC2}"><requestId>r</requestId>{inner}</{action}Response>'
