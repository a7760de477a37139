"""Files that commands on other hosts send to a controller: manifests, what a folder has, the store in the home, and the sending.

A file is split into parts of PART_BYTES, each named by its SHA-256, so that only parts that the controller lacks are sent, and an
upload that is cut off goes on where it was.
"""
