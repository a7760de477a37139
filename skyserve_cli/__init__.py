"""The command line, the controller and all else that users call.

It imports the packages below (`provisioners`, `policies`, and of `lb` only `lb.config.schema`,
`lb.core.targets` and `lb.core.queue`), never the reverse. Inside: commands > sim > controller > state > spec.
"""

__version__ = "0.2.0"
