"""Sealed backups of the home, on this host and in a bucket, and new keys for it."""
