"""The user's own hosts as a cloud: `pool` is the configuration, `machines` claims GPUs of the hosts over SSH.

There is no API, network or price of a cloud here. `host_cache` keeps what hosts had when they last responded.
"""
