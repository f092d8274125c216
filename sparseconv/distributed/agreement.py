"""What the ranks say to one another before anything travels: who asks for what, and who failed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def agreed(work: Callable[[], tuple[T, dict[str, Any]]], group: dist.ProcessGroup | None) -> T:
    """What ``work`` makes on this rank, once no rank failed and all say the same of it; all ranks call it.

    Args:
        work: returns what it made, and what must be equal on all ranks, by name. It calls no collective.
        group: the ranks.

    Raises:
        ValueError, or TypeError where all errors are: on every rank, where ``work`` raised on any, or the ranks differ.
    """
    made, said, own = None, {}, None
    try:
        made, words = work()
        said = {name: repr(value) for name, value in words.items()}
    except Exception as error:  # whatever it is, the others must hear of it
        own = error
    failure = None if own is None else (why(own), isinstance(own, TypeError))
    heard: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(heard, (said, failure), group=group)
    failed = {rank: failure for rank, (_, failure) in enumerate(heard) if failure is not None}
    if failed:
        kind = TypeError if all(is_type for _, is_type in failed.values()) else ValueError
        texts = [text for text, _ in failed.values()]
        if len(failed) == len(heard) and len(set(texts)) == 1:
            raise kind(texts[0]) from own
        raise kind("; ".join(f"rank {rank}: {text}" for rank, (text, _) in failed.items())) from own
    for name in said:
        values = [one.get(name) for one, _ in heard]
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise ValueError(f"the ranks disagree in {name}: {listed}")
    return made  # type: ignore[return-value]


def agreed_call(
    work: Callable[[], tuple[T, tuple]],
    what: str,
    group: dist.ProcessGroup | None,
    device: torch.device,
    kept: set[tuple] | None = None,
) -> T:
    """`agreed` for calls that come often: ``work`` returns what it made and the kind of this call.

    On a CPU every call is compared, by eight bytes per rank. On a GPU that would wait for the device: each kind of call
    is compared once and remembered in ``kept``, or none is, without it, and a rank then hears of its own errors only.
    """
    made, call, own = None, None, None
    try:
        made, call = work()
    except Exception as error:
        own = error
    if device.type == "cpu":
        text = repr(call) if own is None else f"{type(own).__name__} {own}"
        mine = torch.tensor([int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")])
        words = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(words, mine, group=group)
        if own is None and len(set(torch.cat(words).tolist())) == 1:
            return made  # type: ignore[return-value]
    elif kept is None or call in kept or (own is not None and kept):  # the others may have been told before
        if own is not None:
            raise own
        return made  # type: ignore[return-value]

    def again() -> tuple[None, dict[str, Any]]:
        if own is not None:
            raise own
        return None, {what: call}

    agreed(again, group)
    if kept is not None and call is not None:
        kept.add(call)
    return made  # type: ignore[return-value]


def why(error: BaseException) -> str:
    """The last line of an error that says something, or its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
