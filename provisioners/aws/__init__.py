"""AWS, by boto3: `machines` rents EC2 instances one at a time, `cloud` makes a provisioner of it.

Only `api` sends requests. No SDK is imported before one of the modules is. Beside the eight modules that clouds share:
`error_codes` is the table that `errors` reads, `discovery` lists what an account can have, `price_list` reads the Price List
API for the catalog, `image` looks up default images, `outbound` checks the routes of subnets, `dns` writes Route 53 records.
"""
