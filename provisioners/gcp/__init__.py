"""Google Cloud, by google-cloud-compute: `machines` rents instances one at a time, `cloud` makes a provisioner of it.

Only `api` sends requests. No SDK is imported before one of the modules is. Beside the eight modules that clouds share:
`error_codes` is the table that `errors` reads, `discovery` lists what a project can have, `price_list` reads the Cloud Billing
catalog without the SDK, `outbound` checks Cloud NAT, `termination` is the program by which a machine deletes itself. Three are
pure parts of `translate` and `network`, each on a subject of its own: `paths` (names of networks), `firewall_rules`, and
`protection` (shielded and confidential machines).
"""
