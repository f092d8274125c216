"""Files with a few bytes changed, each read by a child process under limits of memory and time."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

#: memory that a read may take beyond what the child had, and seconds that it may go on (machines may be busy)
MEMORY, SECONDS = 2 << 30, 120.0
#: what a reader may raise
ERRORS = (ValueError, TypeError, MemoryError)
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
#: a case of the fuzzer: a name to report and a read that returns how it ended
Case = tuple[str, Callable[[], str]]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one to four changes: bits, numbers, pieces cut, doubled, moved or lost; half of them early."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        size = len(out)
        at = rng.randrange(min(size, 512) if rng.random() < 0.5 else size) if size else 0
        match rng.randrange(8):
            case 0 | 1 if size:
                out[at] ^= 1 << rng.randrange(8)
            case 2 if size:
                out[at] = rng.randrange(256)
            case 3 | 4:
                width = rng.choice((1, 2, 4, 8))
                value = rng.choice(EXTREMES) % (1 << 8 * width)
                out[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))
            case 5:
                del out[at:]
            case 6:
                del out[at : at + rng.choice((1, 2, 16, 300))]
            case _:
                piece = out[at : at + rng.choice((1, 4, 64, 1000))]
                to = rng.randrange(size + 1)
                out[to:to] = piece * rng.choice((1, 1, 3))
    return bytes(out)


def judged(read: Callable[[], str]) -> str:
    """How a read ended: what it says of itself, "refused", or a failure in capitals."""
    try:
        return read()
    except ERRORS:
        return "refused"
    except Exception as error:
        return f"RAISED {type(error).__name__}: {str(error)[:200]}"


def run(case: Callable[[int], Case], count: int, processes: int = 2) -> tuple[Counter[str], list[str]]:
    """Run cases 0 .. count - 1 in children; how often each end was met, and the failures in words."""
    ends: Counter[str] = Counter()
    failures: list[str] = []
    todo = list(range(count))
    chunks = [todo[n::processes] for n in range(processes)]
    children = [_Child(case, chunk) for chunk in chunks if chunk]
    while children:
        ready, _, _ = select.select([c.pipe for c in children], [], [], 1.0)
        for child in list(children):
            if child.pipe in ready:
                lines = child.lines()
            elif time.monotonic() - child.since > SECONDS:
                lines = [f"HUNG for over {SECONDS:.0f} s", None]
                child.end()
            else:
                continue
            for line in lines:
                if line is None:
                    children.remove(child)
                    rest = child.left
                    if rest:
                        children.append(_Child(case, rest))
                    break
                number = child.left.pop(0)
                ends[line.split()[0] if line[:1].isupper() else line] += 1
                if line[:1].isupper():
                    failures.append(f"case {number}, {case(number)[0]}: {line}")
    return ends, failures


class _Child:
    """A process that runs cases one after another and writes a line for each."""

    def __init__(self, case: Callable[[int], Case], numbers: list[int]) -> None:
        self.left, self.since, self._rest = list(numbers), time.monotonic(), b""
        self.pipe, out = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(out)
            return
        code = 1
        with contextlib.suppress(BaseException):
            os.close(self.pipe)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            for number in numbers:
                os.write(out, judged(case(number)[1]).replace("\n", " ").encode() + b"\n")
            code = 0
        os._exit(code)

    def lines(self) -> list[str | None]:
        """Ends that were written since; None where there will be no more."""
        found = os.read(self.pipe, 1 << 16)
        self.since = time.monotonic()
        if found:
            *whole, self._rest = (self._rest + found).split(b"\n")
            return [line.decode(errors="replace") for line in whole]
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        return [f"CRASHED with status {status}", None] if self.left else [None]

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pipe)


def failures_of(what: str, count: int, seed: int, make: Callable[[int, Path], Callable[[int], Case]]) -> list[str]:
    """The failures, in words, of ``count`` changed files of ``make(seed, folder)``; how the others ended is printed."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"fuzz_{what}_") as folder:
        ends, failures = run(make(seed, Path(folder)), count)
    told = ", ".join(f"{number} {end}" for end, number in sorted(ends.items()))
    print(f"{count} {what}: {told}; in {time.monotonic() - begin:.0f} s", flush=True)
    return failures
