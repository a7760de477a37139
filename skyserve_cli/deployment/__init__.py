"""A controller on a host of the user's own: installing it over SSH, running it there, and moving a home there.

Every step looks first at what is there and can be repeated: a command that was interrupted is completed by the next one.
"""
