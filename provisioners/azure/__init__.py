"""Azure, by azure-mgmt-compute and azure-mgmt-network: `machines` rents virtual machines one at a
time, `cloud` makes a provisioner of it.

`errors` is the one table of codes; only `client` sends requests. No SDK is imported before one of its modules is.
"""
