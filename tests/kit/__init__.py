"""The chaos simulator of the tests: one service under a faulty cloud, with a controller that crashes, by seed.

`fault_cloud` is the cloud, `sim_ports` implements the controller's ports on it, `life` runs a service, and `invariants`
checks what must hold after every tick. The same seed gives the same run.
"""
