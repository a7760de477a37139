"""The daemon: one reconciler and its hands.

The law of this room: `reconciler.py` decides nothing that `policies.plan` can decide and touches nothing but
the store; its hands (`runner`, `instance_poller`, `probes`, `lb_fleet`) touch the world and decide nothing. The hands
are level-triggered: each tick tells them what should be so, and they work towards it. A restart is therefore
not a special case: the rows say what should be so, and that is all there is to know.

`daemon.py` is the composition root, the only place that builds things.
"""
