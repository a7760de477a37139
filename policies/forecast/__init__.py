"""Forecasts: how full the memory of an engine will get, what replicas can serve, and how much demand will come."""
