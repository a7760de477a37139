"""The table an agent serves by: its schema, strict JSON decoding, options with bounds, the file it is stored in, edits.

No I/O but `file`. The controller imports `schema` and `options`, and nothing else of the agent.
"""
