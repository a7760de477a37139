"""Top floor: everything a user touches, and the daemon.

The law of this floor: it imports the floors below (`provisioners`, `policies`, and of `lb` only `lb.config.schema`,
`lb.core.targets` and `lb.core.queue`), never the reverse. Inside: commands > sim > controller > state > spec.
"""

__version__ = "0.2.0"
