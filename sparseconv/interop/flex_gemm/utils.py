"""Files of FlexGEMM's autotuner, which has nothing to tune here."""

from __future__ import annotations

from typing import Any


def get_autotune_cache() -> dict[str, Any]:
    """Nothing was tuned."""
    return {}


def save_autotune_cache(path: Any = None) -> None:
    """Accepted, without effect: no file is written."""


def load_autotune_cache(path_or_cache: Any = None) -> None:
    """Accepted, without effect: no file is read."""
