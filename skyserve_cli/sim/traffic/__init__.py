"""Requests against engines in virtual time: the production balancer over the engine model.

The law of this room: routing policies, target table, queue, dispatch and admission are those of `lb`, the engines
are `skyserve_cli.engine.model`; only the network between them and the clients are simulated. Same workload, same
seed, same setting: same digest.

- `workloads` says what a request is, `trees`, `chat` and `mooncake` make them;
- `driver` runs them, event by event; `script` is what makes the engines say what the workload expects;
- `measure` turns what happened into numbers.
"""
