"""Serving from several regions in virtual time: `python -m benchmarks.regions --help`."""
