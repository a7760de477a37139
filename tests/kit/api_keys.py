"""API keys whose limits are named as in a service file."""

from __future__ import annotations

import hashlib
from typing import Any

from lb.config.key_limits import LIMITS, KeyLimits
from lb.config.options import ApiKey


def api_key(name: str, secret: str, **options: Any) -> ApiKey:
    """Return the key `secret` of that owner, with these limits and other options."""
    limits = {option: value for option, value in options.items() if option in LIMITS}
    others = {option: value for option, value in options.items() if option not in LIMITS}
    digest = hashlib.sha256(secret.encode()).hexdigest()
    return ApiKey(name, digest, KeyLimits(**limits), **others)
