"""Forecasts: how long responses will be, and how full an engine's memory will get."""
