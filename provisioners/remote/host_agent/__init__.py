"""What runs on a machine for its replica.

Python 3.8 and its standard library, nothing of the rest of the product but this folder and `provisioners.files`, which are
sent there as one file (`bundle`).

The rule here: the folder of the machine is the state, and no report comes from a process that may be dead. The controller
dials in; nothing here dials out, but to the machine's own metadata service.
"""
