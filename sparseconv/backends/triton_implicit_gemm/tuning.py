"""The choice among a few configurations: compiled side by side, timed once, kept by Triton's cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from sparseconv.torch_private import busy

logger = logging.getLogger(__name__)
#: seconds of compiling after which a line says so
PATIENCE = 2.0
#: milliseconds of timing that one choice may take in all
BUDGET_MS = 300.0
#: milliseconds between two events: short launches are repeated to fill it
SAMPLE_MS = 0.3
#: the share by which a candidate must be faster than one that is expected to be: less is noise, and short runs do not
#: show what a card's power limit does to long ones
MARGIN = 0.02
#: milliseconds by which one must be faster that takes another schedule than what is expected: every new map would have
#: both, for 0.02 ms of the card and 0.1 of the host, which the layers over it share
OWN_LISTS_MS = 0.01
#: device cycles that the host is given to launch one step; of a host that was late, the sample is taken again
HEAD_START_CYCLES = 100_000
#: times that a sample is taken, each with four times the head start
SAMPLE_TRIES = 3

Config = TypeVar("Config")


def tuning_enabled() -> bool:
    """Whether candidates are timed on first use: where the environment variable SPARSECONV_AUTOTUNE is 1."""
    return os.environ.get("SPARSECONV_AUTOTUNE", "0") != "0"


def considered(candidates: Sequence[Config]) -> Sequence[Config]:
    """Those that are compiled ahead: all that are timed; the expected best alone, where none is."""
    return candidates if tuning_enabled() else candidates[:1]


class Tuner:
    """Remembers which configuration was fastest for a key, in this process and in Triton's cache folder."""

    def __init__(self) -> None:
        self._chosen: dict[tuple[object, ...], Any] = {}
        self._lock = threading.Lock()

    def choose(
        self,
        key: tuple[object, ...],
        candidates: Sequence[Config],
        step_of: Callable[[Config], Any],
        tensors: tuple[torch.Tensor, ...],
        ahead: Callable[[], None] = lambda: None,
        times: bool = True,
    ) -> tuple[Config, bool]:
        """The fastest candidate, the first of those that are as fast, and whether that is settled for later calls with
        this key and these candidates.

        The first candidate that this Triton can compile where timing is off or impossible; while a graph is captured
        that is not the last word, nor where the caller's map does not stand for its size (``times`` is False).
        ``ahead`` is called before candidates are compiled.
        """
        device = tensors[0].device
        if len(candidates) == 1 or device.type != "cuda":
            return candidates[0], True
        if not tuning_enabled():
            return _first_that_compiles(candidates, step_of), True
        asked = (key, *candidates)
        found = self._chosen.get(asked)
        if found is not None:
            return found, True
        if torch.cuda.is_current_stream_capturing():
            return candidates[0], False
        with self._lock:
            name = _cache_name(key, candidates, device)
            index = _read(name)
            if not times and (index is None or not 0 <= index < len(candidates)):
                return _first_that_compiles(candidates, step_of), False
            if index is None or not 0 <= index < len(candidates):
                ahead()
                good = _compile_all([(config, step_of(config)) for config in candidates], tensors, key)
                timings = _time_all(good, tensors)
                index = list(candidates).index(first_of_the_fastest(timings))
                _write(name, index, timings)
            self._chosen[asked] = candidates[index]
            return candidates[index], True


def first_of_the_fastest(timings: Sequence[tuple[Config, float]]) -> Config:
    """The first configuration that is as fast as the fastest, within `MARGIN`.

    >>> first_of_the_fastest([("expected", 1.01), ("second", 1.0), ("third", 1.5)])
    'expected'
    >>> first_of_the_fastest([("expected", 1.03), ("second", 1.005), ("third", 1.0)])
    'second'

    One that takes a schedule of its own is not worth that for a few microseconds.
    """
    lists = _lists_of(timings[0][0])
    alike = [(config, ms) for config, ms in timings if _lists_of(config) == lists]
    fastest, like_expected = (min(ms for _, ms in some) for some in (timings, alike))
    if like_expected <= fastest + OWN_LISTS_MS:
        timings, fastest = alike, like_expected
    return next(config for config, ms in timings if ms <= (1 + MARGIN) * fastest)


def _first_that_compiles(candidates: Sequence[Config], step_of: Callable[[Config], Any]) -> Config:
    """The first candidate, unless this Triton or this card cannot take it."""
    if torch.cuda.is_current_stream_capturing():
        return candidates[0]
    errors: list[Exception] = []
    for config in candidates:
        try:
            step_of(config).compile()
            return config
        except Exception as error:
            logger.info("candidate %s dropped: %s", config, error)
            errors.append(error)
    raise errors[0]


def _lists_of(config: Any) -> Any:
    return getattr(config, "lists", None)


def _compile_all(
    steps: list[tuple[Config, Any]], tensors: tuple[torch.Tensor, ...], key: tuple[object, ...]
) -> list[tuple[Config, Any]]:
    """Compile every candidate on a thread of its own; those that this Triton or this card cannot take drop out."""
    good: list[tuple[Config, Any]] = []

    def build(step: Any) -> None:
        with torch.cuda.device(tensors[0].device):
            step.compile()

    with ThreadPoolExecutor(len(steps)) as pool:
        futures = [pool.submit(build, step) for _, step in steps]
        if wait(futures, PATIENCE).not_done:
            logger.warning("compiling %d kernels for %s (kept for later in Triton's cache)", len(steps), key)
        for pair, future in zip(steps, futures):
            error = future.exception()
            if error is None:
                good.append(pair)
            else:
                logger.info("candidate %s dropped: %s", pair[0], error)
    if not good:
        raise RuntimeError(f"no kernel could be compiled for {key}: the first error was {futures[0].exception()}")
    return good


def _time_all(steps: list[tuple[Config, Any]], tensors: tuple[torch.Tensor, ...]) -> list[tuple[Config, float]]:
    """Median milliseconds of each candidate that runs, measured with events, in turns.

    Not the least: those are of a card that is not yet at its power limit, where another candidate may be the fastest.
    """
    ready: list[tuple[Config, Any]] = []
    samples: list[list[float]] = []
    counts: list[int] = []
    for config, step in steps:
        try:
            step(*tensors)
            repeats = int(min(10, max(1, SAMPLE_MS / max(1e-3, _elapsed(step, tensors, 1)))))
            samples.append([_elapsed(step, tensors, repeats)])
            counts.append(repeats)
            ready.append((config, step))
        except Exception as error:
            logger.info("candidate %s dropped: %s", config, error)
    if not ready:
        raise RuntimeError("no candidate kernel could be launched on this device")
    one_round = sum(values[0] * count for values, count in zip(samples, counts))
    for _ in range(int(min(10, max(2, BUDGET_MS / max(1e-3, one_round))))):
        for (_, step), values, count in zip(ready, samples, counts):
            values.append(_elapsed(step, tensors, count))
    return [(config, sorted(values)[len(values) // 2]) for (config, _), values in zip(ready, samples)]


def _elapsed(step: Any, tensors: tuple[torch.Tensor, ...], repeats: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for more in range(SAMPLE_TRIES):
        # the launches queue up behind it: what is timed is the device
        busy(repeats * HEAD_START_CYCLES * 4**more)
        begin.record()
        for _ in range(repeats):
            step(*tensors)
        end.record()
        is_late = begin.query()  # the device may have waited for a launch
        end.synchronize()
        if not is_late:
            break
    return begin.elapsed_time(end) / repeats


def _cache_name(key: tuple[object, ...], candidates: Sequence[Any], device: torch.device) -> str:
    import triton

    text = repr(
        (key, [asdict(config) for config in candidates], torch.cuda.get_device_name(device), triton.__version__)
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _read(name: str) -> int | None:
    from triton.runtime.cache import get_cache_manager

    path = get_cache_manager(name).get_file("choice.json")
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return int(json.load(file)["index"])
    except (OSError, ValueError, KeyError):
        return None


def _write(name: str, index: int, timings: list[tuple[Any, float]]) -> None:
    from triton.runtime.cache import get_cache_manager

    text = json.dumps({"index": index, "ms": [[str(config), ms] for config, ms in timings]})
    get_cache_manager(name).put(text, "choice.json", binary=False)
