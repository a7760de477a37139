"""The controller: a reconciler, and the components that act for it.

`reconcile` decides and writes only to the store; policies decide what `policies.plan` can decide. The components (`clouds`,
`balancers`, `readiness`) act and decide nothing. They are level-triggered: each tick states what should exist, and they work
towards it, so a restart is not a special case. `daemon` is the composition root, the only module that builds components.

Layers, from the top: daemon; callbacks, api; readiness, supervisor; balancers, clouds, persistence; reconcile.
"""
