"""What runs behind a target: the kinds of engines, their load, and their health."""
