"""Lambda's on-demand instances (https://docs.lambda.ai/api/cloud), as a plug-in.

`machines` has also what the other clouds have in modules of their own: the firewall is one call, and there is neither a network
to set up nor a spot price. `prices` are those of the catalog.
"""
