"""The interfaces behind which clouds are, and the values and errors that pass through them.

`base` is the interface of a cloud, `vm` that of a cloud that rents machines, `host_port` that to what runs on a machine.
Imports nothing else of `provisioners` but its clock.
"""
