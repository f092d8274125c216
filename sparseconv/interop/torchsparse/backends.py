"""Switches that code for version 2.1 sets; none has an effect."""

from __future__ import annotations

benchmark = False
allow_tf32 = True
allow_fp16 = True
hash_rsv_ratio = 2


def init() -> None:
    """Accepted, without effect."""
