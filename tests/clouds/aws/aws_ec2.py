"""EC2 as strict as it is, around moto, which is not.

What moto does not do, or does wrongly, is done before the request reaches it: client tokens are idempotent and remember
failed calls, MaxCount counts, instance types are checked against zones, there is capacity and quota, instances take time
to boot, to show up in lists and to die, and groups in use cannot be deleted."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from ipaddress import ip_network
from typing import Any

from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES
from moto.ec2.models.instances import InstanceState
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.wrappers import Response

from tests.clouds.aws.aws_account import AwsAccount, Launched, Life
from tests.clouds.aws.aws_wire import (
    Call,
    Refusal,
    answered_json,
    answered_list,
    id_of_the_instance,
    iso,
    utc,
    with_launch_time,
    without_instances,
)

_QUOTAS = {  # vCPUs, by the letter of the family and the market
    ("g", "on-demand"): "L-DB2E81BA",
    ("g", "spot"): "L-3819A6DF",
    ("p", "on-demand"): "L-417A185B",
    ("p", "spot"): "L-7212CCBC",
    ("t", "on-demand"): "L-1216C47A",
    ("t", "spot"): "L-34B43A08",
}


@dataclass(slots=True)
class StrictEc2(AwsAccount):
    """The responses of the account."""

    def answer(self, call: Call, environ: dict[str, Any]) -> tuple[Response, list[Callable[[], None]]]:
        self._age()
        own = getattr(self, f"_do_{call.action}", None)
        if own is None:
            return self._forward(call, environ), []
        answer = own(call, environ)
        return answer if isinstance(answer, tuple) else (answer, [])

    def _forward(self, call: Call, environ: dict[str, Any]) -> Response:
        """Let moto respond, on pages of our size."""
        if "MaxResults" in call.params:
            call.params["MaxResults"] = str(min(int(call.params["MaxResults"]), self.page_size))
        body = call.body()
        inner = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        response = Response.from_app(_moto(call.service), inner, buffered=True)
        # moto forgets what it cannot do into pages of HTML
        assert response.status_code < 500, (call.action, response.get_data(as_text=True)[:500])
        return response

    # What we do instead of moto, by the name of the action.

    def _do_RunInstances(self, call: Call, environ: dict[str, Any]) -> Any:
        token = str(call.params.get("ClientToken", ""))
        if not (0 < len(token) <= 64 and token.isascii()):
            raise Refusal("InvalidParameterValue", "ClientToken must have 1 to 64 ASCII characters")
        rest = {key: value for key, value in call.params.items() if key != "ClientToken"}
        fingerprint = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
        known = self._tokens.get((call.region, token))
        if known is not None:
            if known[0] != fingerprint:
                raise Refusal(
                    "IdempotentParameterMismatch", "Arguments are inconsistent with an earlier request."
                )
            if known[1]:
                life = self._lives.get(known[2])
                if life is None or life.ended is not None:
                    raise Refusal("IdempotentInstanceTerminated", "The token is of a terminated instance.")
                return Response(known[1], 200, content_type="text/xml")
        self._tokens[call.region, token] = (fingerprint, b"", "")  # of failed calls, too
        zone = self._check_launch(call)
        call.params["NetworkInterface.1.PrivateIpAddress"] = self._address(call)
        response = self._forward(call, environ)
        if response.status_code >= 400:
            return response
        response.set_data(with_launch_time(response.get_data(), self.now()))
        instance_id = id_of_the_instance(response.get_data())
        self._tokens[call.region, token] = (fingerprint, response.get_data(), instance_id)
        return response, [self._born(call, instance_id, zone)]

    def _check_launch(self, call: Call) -> str:
        """The zone's id, if the launch can be."""
        params, backend = call.params, self._backend(call.region)
        lowest, highest = int(params.get("MinCount", 0)), int(params.get("MaxCount", 0))
        if (lowest, highest) != (1, 1):
            raise Refusal("InvalidParameterValue", "this world launches one instance at a time")
        if len(base64.b64decode(params.get("UserData", ""))) > 16_384:
            raise Refusal("InvalidParameterValue", "User data is limited to 16384 bytes")
        if params["ImageId"] not in backend.amis:
            raise Refusal("InvalidAMIID.NotFound", f"The image id '[{params['ImageId']}]' does not exist")
        key = params.get("BlockDeviceMapping.1.Ebs.KmsKeyId")
        if key is not None and key not in self.kms_keys:
            raise Refusal("InvalidKmsKey.InvalidState", "The KMS key provided is in an incorrect state")
        if params["KeyName"] not in backend.key_pairs:
            raise Refusal("InvalidKeyPair.NotFound", f"The key pair '{params['KeyName']}' does not exist")
        subnet = next(
            (one for one in backend.describe_subnets() if one.id == params["NetworkInterface.1.SubnetId"]),
            None,
        )
        if subnet is None:
            raise Refusal("InvalidSubnetID.NotFound", "The subnet does not exist")
        if backend.get_security_group_from_id(params["NetworkInterface.1.SecurityGroupId.1"]) is None:
            raise Refusal("InvalidGroup.NotFound", "The security group does not exist")
        zone, kind = subnet._availability_zone.zone_id, params["InstanceType"]
        offered = _offered(call.region)
        if kind not in offered:
            raise Refusal("InvalidParameterValue", f"Invalid value '{kind}' for InstanceType.")
        if zone not in offered[kind]:
            raise Refusal("Unsupported", f"Your requested instance type ({kind}) is not supported in {zone}.")
        market = params.get("InstanceMarketOptions.MarketType", "on-demand")
        self._check_quota(call.region, kind, market)
        room = self.room.get((zone, kind, market))
        if room is not None:
            if room < 1:
                raise Refusal(
                    "InsufficientInstanceCapacity",
                    f"We currently do not have sufficient {kind} capacity in {zone}.",
                )
            self.room[zone, kind, market] = room - 1
        return str(zone)

    def _check_quota(self, region: str, kind: str, market: str) -> None:
        limit = self.quota_vcpus.get((region, _QUOTAS.get((kind[0], market), "")))
        if limit is None:
            return
        mine = [life.room for life in self._lives.values() if life.region == region and life.ended is None]
        used = sum(_vcpus(one) for _, one, of in mine if of == market and one[0] == kind[0])
        if used + _vcpus(kind) > limit:
            code = "MaxSpotInstanceCountExceeded" if market == "spot" else "VcpuLimitExceeded"
            raise Refusal(
                code, f"You have requested more vCPU capacity than your current vCPU limit of {limit} allows"
            )

    def _born(self, call: Call, instance_id: str, zone: str) -> Callable[[], None]:
        backend, params = self._backend(call.region), call.params
        instance = backend.get_instance(instance_id)
        market = params.get("InstanceMarketOptions.MarketType", "on-demand")
        instance.launch_time = utc(self.now())
        instance._state = InstanceState("pending", 0)
        tags = call.tags("instance")
        number = next(self._numbers)
        self._lives[instance_id] = Life(
            instance,
            call.region,
            self.now(),
            (zone, params["InstanceType"], market),
            f"sir-{number:08x}" if market == "spot" else None,
            tags,
            spot_since=self.now(),
        )
        instance.spot_instance_request_id = self._lives[instance_id].request_id
        for card in instance.nics.values():
            backend.create_tags([card.id], call.tags("network-interface"))  # which moto drops
        (pair,) = backend.describe_key_pairs(key_names=[params["KeyName"]])
        facts = Launched(
            instance_id,
            call.region,
            zone,
            params["InstanceType"],
            instance.private_ip,
            instance.public_ip,
            base64.b64decode(params.get("UserData", "")).decode(),
            pair.material_public.decode()
            if isinstance(pair.material_public, bytes)
            else pair.material_public,
            tags,
        )
        return lambda: self.on_launch(facts)

    def _do_DescribeInstances(self, call: Call, environ: dict[str, Any]) -> Response:
        response = self._forward(call, environ)
        hidden = {key for key, life in self._lives.items() if self.now() - life.born < self.listed_after_s}
        if hidden and response.status_code == 200:
            response.set_data(without_instances(response.get_data(), hidden))
        return response

    def _do_TerminateInstances(self, call: Call, environ: dict[str, Any]) -> Any:
        ids = call.list("InstanceId")
        for instance_id in ids:
            life = self._lives.get(instance_id)
            if life is None or life.region != call.region or self.now() - life.born < self.listed_after_s:
                raise Refusal("InvalidInstanceID.NotFound", f"The instance ID '{instance_id}' does not exist")
        gone = [one for one in ids if self._lives[one].ended is None]  # how the others ended stays as it is
        for one in gone:
            life = self._lives[one]
            if life.room in self.room:
                self.room[life.room] += 1
            life.instance.terminate()
            life.spot_code, life.spot_since = "instance-terminated-by-user", self.now()
            self._ended(one)
        items = [{"instanceId": one, "currentState": {"code": 32, "name": "shutting-down"}} for one in ids]
        response = answered_list(call.action, "instancesSet", items)
        return response, [partial(self.on_gone, one) for one in gone]

    def _do_DeleteSecurityGroup(self, call: Call, environ: dict[str, Any]) -> Response:
        for life in self._lives.values():
            groups = {group.id for card in life.instance.nics.values() for group in card.group_set}
            if call.params["GroupId"] in groups and life.instance._state.name != "terminated":
                raise Refusal(
                    "DependencyViolation", f"resource {call.params['GroupId']} has a dependent object"
                )
        return self._forward(call, environ)

    def _do_DescribeRegions(self, call: Call, environ: dict[str, Any]) -> Response:
        regions = [{"regionName": name, "regionEndpoint": self.url} for name in self.regions]
        return answered_list(call.action, "regionInfo", regions)

    def _do_DescribeSpotInstanceRequests(self, call: Call, environ: dict[str, Any]) -> Response:
        wanted = call.filters()
        found = []
        for instance_id, life in self._lives.items():
            if life.request_id is None or life.region != call.region:
                continue
            facts = {"state": "active" if life.ended is None else "closed", "status-code": life.spot_code}
            facts |= {f"tag:{key}": value for key, value in life.tags.items()}
            if all(facts.get(name) in values for name, values in wanted.items()):
                found.append(
                    {
                        "spotInstanceRequestId": life.request_id,
                        "instanceId": instance_id,
                        "state": facts["state"],
                        "status": {"code": life.spot_code, "updateTime": iso(life.spot_since)},
                        "tagSet": [{"key": key, "value": value} for key, value in life.tags.items()],
                    }
                )
        return answered_list(call.action, "spotInstanceRequestSet", found)

    def _do_CancelSpotInstanceRequests(self, call: Call, environ: dict[str, Any]) -> Response:
        known = {life.request_id for life in self._lives.values() if life.region == call.region}
        for request_id in call.list("SpotInstanceRequestId"):
            if request_id not in known:
                raise Refusal(
                    "InvalidSpotInstanceRequestID.NotFound", "The spot instance request ID does not exist"
                )
        return answered_list(call.action, "spotInstanceRequestSet", [])

    def _do_DescribeSpotPriceHistory(self, call: Call, environ: dict[str, Any]) -> Response:
        entries = [
            {
                "instanceType": kind,
                "productDescription": "Linux/UNIX",
                "spotPrice": f"{price:.6f}",
                "timestamp": iso(at),
                "availabilityZone": zone,
            }
            for kind, zone, price, at in self.prices
            if zone.startswith(call.region)
        ]
        return answered_list(call.action, "spotPriceHistorySet", entries)

    def _do_GetParameter(self, call: Call, environ: dict[str, Any]) -> Response:
        image = self.images.get((call.region, call.params["Name"]))
        if image is None:
            raise Refusal("ParameterNotFound", f"Parameter {call.params['Name']} not found.")
        return answered_json({"Parameter": {"Name": call.params["Name"], "Type": "String", "Value": image}})

    def _do_GetServiceQuota(self, call: Call, environ: dict[str, Any]) -> Response:
        vcpus = self.quota_vcpus.get((call.region, call.params["QuotaCode"]))
        if vcpus is None:
            raise Refusal(
                "NoSuchResourceException", "The request failed because the specified quota does not exist."
            )
        return answered_json({"Quota": {"QuotaCode": call.params["QuotaCode"], "Value": float(vcpus)}})

    def _do_ListServiceQuotas(self, call: Call, environ: dict[str, Any]) -> Response:
        if not 1 <= int(call.params.get("MaxResults", 100)) <= 100:
            raise Refusal("IllegalArgumentException", "MaxResults must be between 1 and 100")
        quotas = sorted(
            (code, vcpus) for (region, code), vcpus in self.quota_vcpus.items() if region == call.region
        )
        start = int(call.params.get("NextToken", 0))
        end = start + min(int(call.params.get("MaxResults", 100)), self.page_size)
        page = [{"QuotaCode": code, "Value": float(vcpus)} for code, vcpus in quotas[start:end]]
        return answered_json({"Quotas": page, **({"NextToken": str(end)} if end < len(quotas) else {})})

    def _do_DescribeInstanceTypes(self, call: Call, environ: dict[str, Any]) -> Response:
        if not 5 <= int(call.params.get("MaxResults", 100)) <= 100:
            raise Refusal("InvalidParameterValue", "Value for parameter maxResults must be between 5 and 100")
        return self._forward(call, environ)

    def _do_DescribeInstanceTypeOfferings(self, call: Call, environ: dict[str, Any]) -> Response:
        """moto knows no wildcards in the filter."""
        if call.params.get("LocationType") != "availability-zone-id":
            return self._forward(call, environ)
        wanted = call.filters()["instance-type"]
        offered = [
            {"instanceType": kind, "locationType": "availability-zone-id", "location": zone}
            for kind, zones in sorted(_offered(call.region).items())
            if any(fnmatchcase(kind, pattern) for pattern in wanted)
            for zone in sorted(zones)
        ]
        start = int(call.params.get("NextToken", 0))
        end = start + min(int(call.params.get("MaxResults", 1000)), self.page_size)
        more = str(end) if end < len(offered) else ""
        return answered_list(call.action, "instanceTypeOfferingSet", offered[start:end], more)

    def _address(self, call: Call) -> str:
        """A private address that no machine of any region has had: they may all be on one bridge."""
        subnet = self._backend(call.region).get_subnet(call.params["NetworkInterface.1.SubnetId"])
        hosts = ip_network(subnet.cidr_block).hosts()
        free = next(
            text
            for text in map(str, hosts)
            if text not in self._addresses and not text.endswith((".1", ".2", ".3"))
        )
        self._addresses.add(free)
        return free


@cache
def _moto(service: str) -> Any:
    return create_backend_app(service)


@cache
def _offered(region: str) -> Mapping[str, set[str]]:
    """Zone ids by instance type."""
    found: dict[str, set[str]] = {}
    for offering in INSTANCE_TYPE_OFFERINGS["availability-zone-id"][region]:
        found.setdefault(offering["InstanceType"], set()).add(offering["Location"])
    return found


def _vcpus(kind: str) -> int:
    return int(INSTANCE_TYPES[kind]["VCpuInfo"]["DefaultVCpus"])
