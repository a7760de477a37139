"""Azure, by azure-mgmt-compute and azure-mgmt-network.

`machines` rents virtual machines one at a time, `cloud` makes a provisioner of it.

Only `api` sends requests. No SDK is imported before one of the modules is. Beside the eight modules that clouds share:
`error_codes` is the table that `errors` reads, `discovery` lists what a subscription can have, `price_list` reads the Retail
Prices API for the catalog, `outbound` checks NAT gateways, `termination` is the program by which a machine deletes itself, `settings` is what the
configuration says, `sovereign_clouds` has the endpoints of Azure's separate clouds.
"""
