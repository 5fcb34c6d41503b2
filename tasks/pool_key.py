"""The key of a pool: every client of its workers and of its keeper must show it.

Derived, not stored, so that the Spark driver on another host can work it out from the deployment secret.
"""

import hmac


def derive(secret: bytes, pool_id: str) -> str:
    """The key of `pool_id` as 64 hex digits (HMAC-SHA-256, RFC 2104)."""
    return hmac.new(secret, f"pool:{pool_id}".encode(), "sha256").hexdigest()
