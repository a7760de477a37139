"""Forecasts: how long answers will be, and how full an engine's memory will get."""
