"""Tuning, which sparseconv does by itself."""

from __future__ import annotations

from typing import Any


def tune(*args: Any, **kwargs: Any) -> None:
    """Accepted, without effect: the backend is chosen by sparseconv."""
