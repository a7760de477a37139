"""The data plane: one load balancer agent per region, between the users of a service and its replicas.

The law of this floor: it stands on `policies` alone and runs alone (`python -m lb ...`), on hosts that have
nothing else of this project. It asks nobody: knowledge about targets is pushed to it (`control`), what it
learns itself it acts on at once, and when its controller is gone it goes on with its last table.

`wire`, `targets`, `queue` and `window` are pure and synchronous, take `now` (seconds, any monotonic clock) as
an argument and import no network library; the simulator runs them in virtual time. Sockets live in the other
rooms. No prompt and no header value is ever logged. Python 3.10 is enough.
"""
