"""The entrance for requests that agents of other regions forward. See `lb.core.hop`.

Who connects here has proved to be an agent of the service. Its requests carry no key and were charged and counted where they
entered, so they are neither charged nor counted as demand a second time. Everything else is as for a client's.
"""

from __future__ import annotations

from urllib.parse import unquote

from lb.core.api_keys import Admission
from lb.core.forwarding import Forwarding
from lb.core.hop import NAME, HopError, read_hop
from lb.http.cors import CorsRules
from lb.http.error_responses import raw_error, raw_json
from lb.http.messages import RequestHead
from lb.proxy.account import Account
from lb.proxy.intake import Intake
from lb.proxy.ports import ClientPort
from lb.proxy.rejections import Rejection
from lb.proxy.request import ProxiedRequest

EXPLAIN = b"/-/explain/"
CAME = "came_from"


class PeerEntrance:
    """The intake as the connections of one peer use it."""

    def __init__(self, intake: Intake, account: Account, forwarding: Forwarding, peer_id: str) -> None:
        self._intake = intake
        self._account = account
        self._forwarding = forwarding
        self._peer_id = peer_id
        self.runtime = intake.runtime
        self.limits = intake.limits  # as they are when the connection is made
        self.heads = intake.heads

    @property
    def cors(self) -> CorsRules | None:
        return None  # the agent where the request entered handles CORS

    def arrived(self) -> None:
        """Count a request of the peer, whose head has arrived."""
        self._forwarding.forwarded_in[self._peer_id] += 1
        self._account.metrics.peers.of(self._peer_id).requests += 1

    def is_trusted_proxy(self, peer: str) -> bool:
        return True  # the peer has written down who its client is

    def is_full(self) -> bool:
        return self._intake.is_full()

    def check(self, head: RequestHead) -> Rejection | Admission | bytes:
        """Let in what a peer forwards, and nothing else."""
        line = (head.ours or {}).get(NAME)
        if line is None and head.path.startswith(EXPLAIN) and head.method == b"GET":
            return self._explanation(head.path_text.removeprefix(EXPLAIN.decode()))
        if line is None:
            return Rejection(400, "no_hop", "This port is for requests that peers forward.")
        try:
            return Admission.of_peer(read_hop(line)._replace(peer=self._peer_id))
        except HopError as error:
            return Rejection(400, "malformed_hop", f"{error}.")

    def _explanation(self, request_id: str) -> bytes:
        """Return what has become here of a request that the peer has forwarded."""
        found = self._account.explanations.find(unquote(request_id))
        if found is None or self._peer_id not in found.targets_of(CAME):
            return raw_error(404, "not_found", "No such request of yours is among the last ones.")
        return raw_json(found.to_json())

    def begin(
        self,
        client: ClientPort,
        head: RequestHead,
        body: bytes,
        admission: Admission,
        structure: int | None = None,
    ) -> ProxiedRequest | Rejection:
        request = self._intake.begin(client, head, body, admission, structure)
        if not isinstance(request, Rejection):
            request.arrival.explanation.note(request.arrival.at, CAME, self._peer_id)
        return request

    def abandoned(self, admission: Admission) -> None:
        self._intake.abandoned(admission)

    def client_gone(self) -> None:
        self._intake.client_gone()

    def refused(self, refusal: Rejection, tenant: str = "") -> None:
        self._intake.refused(refusal)  # the key's refusals are counted where its request entered
