"""Requests against simulated engines in virtual time, through the production load balancer.

Routing policies, target table, queue, scheduler and admission are those of `lb`; the engines are `skyserve_cli.engine.model`.
Only the network and the clients are simulated. The same workload, seed and setting give the same digest.

- `workloads` defines a request; `trees`, `chat`, `documents` and `mooncake` generate them;
- `driver` runs the events; `script` makes the engines generate what the workload expects;
- `measure` computes the metrics.
"""
