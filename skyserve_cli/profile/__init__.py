"""Measures what one replica carries within an SLO, for `serve profile`.

`capacity` and `ramp` are pure: from steps (a load, its requests, the late ones of them) to an estimate, and to the load of the
next step. `load` plays a step against a server: an open loop, so that a slow server does not slow the arrivals down.
`prompts` draws the prompts, and `measure` joins them.
"""
