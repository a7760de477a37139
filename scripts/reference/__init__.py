"""Generates the pages below docs/reference/ from the code: `python -m scripts.reference`."""
