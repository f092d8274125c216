"""Two clocks with one face: CUDA events on a GPU, the wall clock on a CPU; milliseconds and bytes.

The protocol: two calls that do not count, then repeats for about 0.6 s, one after another without waiting between them;
the median, and the span of the middle 80 % beside it. What the CPU had to do meanwhile stands there as its pace.
"""

from __future__ import annotations

import ctypes
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from sparseconv import memory

WARM_UPS = 2
#: repeats of one figure: no fewer, no more
FEWEST, MOST = 5, 2000
#: milliseconds of repeats between two looks at the CPU's pace
LOOK_MS = 50.0


def pace() -> float:
    """Microseconds that a fixed piece of Python takes here and now, the median of twenty: a millisecond in all."""
    found = []
    for _ in range(20):
        begin = time.perf_counter()
        kept: dict[int, tuple[int, str]] = {}
        for i in range(300):
            kept[i & 63] = (i, str(i & 7))
            kept.get(i & 31)
        found.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(found)


@dataclass
class Samples:
    """Milliseconds of each repeat, and the CPU's `pace` at moments between them."""

    times: list[float] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)

    def __add__(self, other: Samples) -> Samples:
        return Samples(self.times + other.times, self.paces + other.paces)


@dataclass(frozen=True)
class Spread:
    """Milliseconds of one figure: median, the 10 % and 90 % quantiles, how many repeats; the CPU's median `pace`."""

    median: float
    p10: float
    p90: float
    repeats: int
    pace: float

    @classmethod
    def of(cls, samples: Samples) -> Spread:
        p10, median, p90 = (float(v) for v in np.quantile(np.asarray(samples.times), (0.1, 0.5, 0.9)))
        return cls(median, p10, p90, len(samples.times), statistics.median(samples.paces))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


class Clock:
    """The wall clock of a CPU; `CudaClock` is its twin for a GPU."""

    device = "cpu"
    fewest = 3

    def wait(self) -> None:
        """Until everything asked of the device is done."""

    def once(self, call: Callable[[], object]) -> float:
        """Milliseconds of one call by the wall clock, waited for."""
        self.wait()
        begin = time.perf_counter()
        call()
        self.wait()
        return 1e3 * (time.perf_counter() - begin)

    def _repeat(self, call: Callable[[], object], count: int, each: int) -> Samples:
        """So many samples, and a look at the CPU's pace before each ``each`` of them."""
        found = Samples()
        for i in range(count):
            if i % each == 0:
                found.paces.append(pace())
            found.times.append(self.once(call))
        return found

    def time(self, call: Callable[[], object], seconds: float = 0.6) -> Spread:
        """The median of repeats for about ``seconds``, after two calls that do not count."""
        return Spread.of(self.samples(call, seconds))

    def samples(self, call: Callable[[], object], seconds: float) -> Samples:
        """What `time` takes the median of."""
        for _ in range(WARM_UPS):
            call()
        guess = max(1e-3, self.once(call))
        count = int(min(MOST, max(self.fewest, 1e3 * seconds / guess)))
        return self._repeat(call, count, max(1, int(LOOK_MS / guess)))

    def peak(self, call: Callable[[], object]) -> int | None:
        """Bytes that one call has at most beyond those held before it; None where this system does not say."""
        if platform.system() != "Linux":
            return None
        memory.release()
        ctypes.CDLL(None).malloc_trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return None
        before = _status("VmRSS")
        call()
        return max(0, _status("VmHWM") - before)


class CudaClock(Clock):
    """CUDA events around every repeat; nobody waits in between: the queue is empty only where the CPU is late."""

    device = "cuda"
    fewest = FEWEST

    def wait(self) -> None:
        torch.cuda.synchronize()

    def _repeat(self, call: Callable[[], object], count: int, each: int) -> Samples:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        stream, paces = torch.cuda.current_stream(), []  # looked up once, not at each event
        self.wait()
        for first in range(0, count, each):
            paces.append(pace())
            for begin, end in pairs[first : first + each]:
                begin.record(stream)
                call()
                end.record(stream)
        self.wait()
        return Samples([begin.elapsed_time(end) for begin, end in pairs], paces)

    def peak(self, call: Callable[[], object]) -> int | None:
        """As asked for: blocks of torch's allocator are larger by what the calls before left it."""
        self.wait()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        call()
        self.wait()
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def clock_of(device: str) -> Clock:
    """The clock of a device: ``"cpu"`` or ``"cuda"``."""
    return CudaClock() if device == "cuda" else Clock()


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Within it, single-precision products may use TF32 if the dtype's name is ``tf32``, and not otherwise."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
