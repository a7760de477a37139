"""The data plane: one load balancer agent per region, between the users of a service and its replicas.

The law of this floor: it stands on `policies` alone and runs alone (`python -m lb ...`), on hosts that have
nothing else of this project. It polls no controller: knowledge about targets is pushed to it (`control`), what it
learns itself it acts on at once, and when its controller is gone it goes on with its last table.

Code that decides is pure and synchronous, takes `now` (seconds, any monotonic clock) as an argument and imports no
network library: the table and its options (`wire`, `options`), who is offered what (`targets`, `admission`, `queue`,
`dispatch`, `budget`, `access`), what engines say (`engines`, `gauges`), HTTP as bytes (`heads`, `framing`), and how a stream
goes on (`journal`, `refusals`, `continuation`, `stitch`, `sse`); the simulator runs some of them in virtual time. Sockets live
in the other rooms. No prompt and no header value is ever logged. Python 3.10 is enough.
"""
