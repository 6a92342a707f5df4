"""Seconds that settings and protocol must agree on; here, so that reading settings waits for nothing."""

from __future__ import annotations

#: For which a write may go on after it was announced.
WRITE_LASTS = 30.0
