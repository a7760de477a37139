"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
