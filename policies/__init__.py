"""Decisions: placement, scaling, routing, rollout and the lifecycle of replicas.

This package is pure: values in, values out. Nothing here reads a clock, draws its own random number, logs,
opens a file or a socket, or imports another package of the project. Time is an argument (`now`, seconds), randomness an
injected `random.Random`, memory a value that goes in and comes out. That is why the same code prints
`serve plan`, drives the daemon and runs in the simulator.

The lb package is pushed to foreign hosts together with this one, so both keep to Python 3.10.
"""
