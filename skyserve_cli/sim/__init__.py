"""The production controller on simulated hands.

The law of this room: the tick, the store, `perform`, the call book and the policies are the production ones;
only what lies beyond the ports is simulated (`world`: the cloud; `hands`: threads, probes, load balancers), on a
clock that is moved, not waited for. Same seed, same story, bit for bit: every draw comes from one seeded
generator, nothing iterates over a set, no wall clock is read.
"""
