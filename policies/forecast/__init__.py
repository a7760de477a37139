"""Forecasts: how full the memory of an engine will get, the work of tokens, what replicas can serve of it, and how much demand will come."""
