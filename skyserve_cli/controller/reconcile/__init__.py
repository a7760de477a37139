"""Reconciliation: reads the desired and the observed state once per tick and decides what each service needs.

`reconciler.tick` is the place to start reading. `turn` handles one service and is pure but for the store; the other modules
are the pure functions that it uses. `ports` declares what the reconciler needs; the daemon and the simulator implement it.
"""
