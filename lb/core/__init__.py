"""The decisions: which target may take a request, which one does, who waits, who may call, which are retried.

Pure and synchronous: `now` (seconds on any monotonic clock) is an argument, and nothing here imports a network library, a
clock or a logger. An import contract checks it. The simulator runs this code in virtual time.
"""
