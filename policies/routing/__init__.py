"""Which target gets the next request: one file per policy, one port (`base`), one list of names (`registry`)."""
