"""The data plane: one load balancer agent per region, between the users of a service and its replicas.

This package imports `policies` and nothing else of the project, and runs alone (`python -m lb ...`) on hosts that have
nothing else of it. It polls no controller: the controller pushes the table of targets to it (`agent.admin_api`). The agent acts at
once on what it learns itself, and goes on with its last table when the controller is gone.

Code that decides is pure and synchronous, takes `now` (seconds, any monotonic clock) as an argument and imports no
network library: the table and its options (`config`), targets, admission, queue, retries and API keys (`core`), parsers of what
engines report (`engines`), HTTP messages as bytes (`http`), and how a broken stream resumes (`stream`). The simulator runs some of
them in virtual time. `agent`, `proxy` and `regions` have the sockets. No prompt and no header value is ever logged.
Python 3.10 is enough.
"""
