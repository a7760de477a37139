"""Notifications: what they are sent about, when, in which form, and how they reach their destinations."""
