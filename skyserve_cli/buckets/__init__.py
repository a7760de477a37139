"""Object stores: objects of a few megabytes by name, below a prefix of a bucket or in a folder. One module per vendor."""
