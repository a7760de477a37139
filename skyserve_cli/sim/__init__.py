"""`serve simulate`: the production controller over recorded or synthetic spot markets, in virtual time.

The tick, the store, the cloud operations and the policies are the production ones. Only what lies beyond the ports of
`skyserve_cli.controller.reconcile.ports` is simulated, on a clock that is moved and never waited for. The same seed gives the
same run, bit for bit: every draw comes from one seeded generator, no code iterates over a set or reads the wall clock.
"""
