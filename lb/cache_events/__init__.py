"""What engines report of their caches: their events, read, checked for gaps, and kept as an index of blocks.

Imported by agents whose table turns it on only: no other agent needs ZeroMQ.
"""
