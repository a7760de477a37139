"""Google Cloud, by google-cloud-compute: `machines` rents instances one at a time, `cloud` makes a provisioner
of it.

`errors` is the one table of codes; only `api` sends requests. No SDK is imported before one of its modules is.
"""
