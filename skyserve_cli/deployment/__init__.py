"""A controller elsewhere: on a host over SSH, on a machine that is rented for it, or in a cluster; and moving a home to a host.

Every step looks first at what is there and can be repeated: a command that was interrupted is completed by the next one.
"""
