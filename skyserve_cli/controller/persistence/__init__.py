"""The controller's database around the store: leadership, backups, key rotation, health, and periodic cleanup."""
