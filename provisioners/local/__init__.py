"""This machine as a cloud of several regions: instances are processes, in network namespaces where there is root.

It has a market (zones that are full, prices, preemptions with and without notice) that is driven by hand or by a
timeline, so that all of the product can be tried, and tested, without an account anywhere.
"""
