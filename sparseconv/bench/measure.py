"""One job measured: an implementation, a case, channels, a dtype, an order of rows, and the quantities asked for.

Nothing is timed before its values are checked, and a value that is off leaves a sentence in place of every figure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from sparseconv.bench import cases, check
from sparseconv.bench.implementations import Convolution, registry
from sparseconv.bench.timing import DTYPES, Clock, Samples, Spread, clock_of, precision

#: from coordinates to everything that a training step needs
MAP = "map"
#: the same by one graph that was captured before: a scene's coordinates copied in, the graph replayed
CAPTURED_MAP = "captured_map"
#: forward alone; each gradient alone; forward and both gradients through autograd, as a user calls it
FORWARD, INPUT_GRAD, WEIGHT_GRAD, STEP = "forward", "input_grad", "weight_grad", "step"
#: most bytes that a step holds beyond what is held between steps (operands, map, the last step's gradients)
MEMORY = "memory"
#: compile, and leave the compiled kernels in the caches
COMPILE = "compile"
#: seconds from before the library is imported to the first gradients of a fresh process, in which torch is ready
COLD = "cold"
#: rows of a captured map over the scene's, in the figure and in the one beside it: as few as fit, and nn.capture's own
ROOM, USUAL_ROOM = 1.0, 1.25
QUANTITIES = (MAP, CAPTURED_MAP, FORWARD, INPUT_GRAD, WEIGHT_GRAD, STEP, MEMORY)


@dataclass(frozen=True)
class Job:
    """What is to be measured."""

    implementation: str
    case: str
    channels: int
    dtype: str = "fp16"
    shuffled: bool = False
    quantities: tuple[str, ...] = QUANTITIES
    device: str = "cuda"
    seconds: float = 0.6
    kernel: int = 3

    @classmethod
    def of(cls, data: dict[str, Any]) -> Job:
        return cls(**{**data, "quantities": tuple(data["quantities"])})

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        order = ", shuffled" if self.shuffled else ""
        kernel = f", kernel {self.kernel}" if self.kernel != 3 else ""
        return f"{self.implementation}: {self.case}, C {self.channels}, {self.dtype}{kernel}{order}"


def measure(job: Job) -> dict[str, Any]:
    """A row of results: the job, N, P, and under each quantity its figures; or ``reason`` where there are none."""
    row: dict[str, Any] = job.as_dict()
    reason = cases.missing(job.case)
    known = registry()
    if reason is None and job.implementation not in known:
        reason = f"no implementation {job.implementation!r}; there are {', '.join(known)}"
    if reason is None:
        reason = known[job.implementation].missing(job.device, job.dtype, job.kernel)
    if reason is not None:
        return row | {"status": "skipped", "reason": reason}
    with precision(job.dtype):
        try:
            return row | _measured(job, known[job.implementation])
        except (MemoryError, torch.OutOfMemoryError) as error:
            return row | {"status": "skipped", "reason": f"out of memory: {str(error).splitlines()[0]}"}


def operands(
    rows: int, channels: int, dtype: str, device: str, taps: int = 27
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (N, C) and grad (N, C) of unit variance, weight (K, C, C) that keeps it so for half of the taps."""
    generator = torch.Generator(device).manual_seed(0)
    kind = DTYPES[dtype]

    def normal(*shape: int) -> torch.Tensor:
        wide = torch.float64 if kind == torch.float64 else torch.float32
        return torch.randn(*shape, generator=generator, device=device, dtype=wide)

    x, grad = normal(rows, channels).to(kind), normal(rows, channels).to(kind)
    return x, (normal(taps, channels, channels) * (max(1, taps // 2) * channels) ** -0.5).to(kind), grad


@functools.lru_cache(maxsize=2)
def _neighbours(case: str, device: str, shuffled: bool, kernel: int) -> tuple[check.Neighbours, int]:
    found = check.Neighbours(cases.coordinates(case, device, shuffled), kernel)
    return found, found.count_pairs()


def _measured(job: Job, kind: type[Convolution]) -> dict[str, Any]:
    clock = clock_of(job.device)
    coords = cases.coordinates(job.case, job.device, job.shuffled)
    neighbours, pairs = _neighbours(job.case, job.device, job.shuffled, job.kernel)
    x, weight, grad = operands(len(coords), job.channels, job.dtype, job.device, job.kernel**3)
    convolution = kind(coords, job.channels, job.dtype, job.kernel)
    convolution.set_weight(weight)
    x.requires_grad_()
    step = _step(convolution, x, grad)
    first = clock.once(lambda: (convolution.prepare(), step()))
    convolution.prepare()
    step()  # on a map of its own: the first step's has what was tried beside what was chosen
    convolution.learn()
    row: dict[str, Any] = {"status": "measured", "voxels": len(coords), "pairs": pairs, "first_s": first / 1e3}
    if job.quantities == (COMPILE,):
        with torch.no_grad():
            convolution.forward(x)
        convolution.settle()
        clock.wait()
        return row
    results = _results(convolution, x, grad)
    verdict = check.judge(neighbours, x.detach(), weight, grad, results, job.dtype, convolution.slack)
    del results
    row["errors"] = verdict.errors
    if verdict.fault is not None:
        return row | {"status": "wrong", "reason": verdict.fault}
    # figures without a gradient first, then with
    timers: dict[str, Callable[[], dict[str, Any]]] = {
        FORWARD: lambda: _forward(clock, job, convolution, x),
        INPUT_GRAD: lambda: _one_gradient(clock, job, convolution, x, grad, of_weight=False),
        WEIGHT_GRAD: lambda: _one_gradient(clock, job, convolution, x, grad, of_weight=True),
        STEP: lambda: clock.time(step, job.seconds).as_dict(),
        MEMORY: lambda: _memory(clock, step),
        MAP: lambda: _map(clock, job, convolution, step),
        CAPTURED_MAP: lambda: _captured_map(clock, job, convolution, x, weight, grad),
    }
    for quantity, timer in timers.items():
        if quantity in job.quantities:
            row[quantity] = timer()
    convolution.prepare()
    with torch.no_grad():
        convolution.forward(x)
    row["details"] = convolution.details()
    return row


def _results(convolution: Convolution, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of a forward and of both gradients."""
    threads = torch.get_num_threads()
    if convolution.unsteady:
        torch.set_num_threads(1)
        convolution.prepare()
    convolution.weight.grad = x.grad = None
    y = convolution.forward(x)
    y.backward(grad)
    torch.set_num_threads(threads)
    assert x.grad is not None
    return {"forward": y.detach(), "input_grad": x.grad, "weight_grad": convolution.weight_grad().detach()}


def _step(convolution: Convolution, x: torch.Tensor, grad: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        x.grad = None
        convolution.weight.grad = None
        convolution.forward(x).backward(grad)

    return step


def _forward(clock: Clock, job: Job, convolution: Convolution, x: torch.Tensor) -> dict[str, Any]:
    with torch.no_grad():
        return clock.time(lambda: convolution.forward(x), job.seconds).as_dict()


def _one_gradient(
    clock: Clock, job: Job, convolution: Convolution, x: torch.Tensor, grad: torch.Tensor, of_weight: bool
) -> dict[str, Any]:
    """One gradient by autograd, the other not asked for."""
    if not convolution.apart:
        return {"reason": "finds both gradients whichever is asked for"}
    convolution.weight.requires_grad_(of_weight)
    source = x.detach() if of_weight else x
    y = convolution.forward(source)
    wanted = convolution.weight if of_weight else source
    found = clock.time(lambda: torch.autograd.grad(y, wanted, grad, retain_graph=True), job.seconds)
    convolution.weight.requires_grad_(True)
    return found.as_dict()


def _memory(clock: Clock, step: Callable[[], None]) -> dict[str, Any]:
    step()
    peak = clock.peak(step)
    return {"peak_mib": None if peak is None else peak / 2**20}


def _map(clock: Clock, job: Job, convolution: Convolution, step: Callable[[], None]) -> dict[str, Any]:
    """What `prepare` takes where it makes all of the map; else what a step on new coordinates takes beyond a step.

    That difference stands beside it in any case: it has the host's work of a first launch, too. A map takes no less
    than its `prepare`; a difference of two noisy times may, down to nothing. `prepare` is repeated in three parts,
    between the others: a host that has something else to do for a second does not set the median.
    """
    convolution.settle()

    def part() -> Samples:
        return clock.samples(convolution.prepare, job.seconds / 3)

    samples = part()
    plain = clock.time(step, job.seconds)
    samples += part()

    def anew() -> None:
        convolution.prepare()
        step()

    both = clock.time(anew, job.seconds)
    alone = Spread.of(samples + part())
    found: dict[str, Any] = {"prepare": alone.as_dict()}
    gap = {"median": max(0.0, both.median - plain.median), "repeats": both.repeats, "pace": max(both.pace, plain.pace)}
    found["in_step"] = gap
    if convolution.lazy and gap["median"] > alone.median:
        return found | {**gap, "by": "in_step"}
    return found | {**alone.as_dict(), "by": "prepare"}


def _captured_map(
    clock: Clock, job: Job, convolution: Convolution, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor
) -> dict[str, Any]:
    """The map of the case by a graph, first with rows for itself alone, then, beside it, with the usual room."""
    found: list[dict[str, Any]] = []
    for room in (ROOM, USUAL_ROOM):
        try:
            captured = convolution.captured(room)
        except RuntimeError as error:  # what no graph can hold
            return {"reason": str(error)}
        if captured is None:
            return {"reason": "makes no map inside a graph here"}
        reason = captured.wrong(x, weight, grad, job.dtype)
        if reason is not None:
            return {"reason": f"with room {room:g} {reason}"}
        replay = functools.partial(captured, convolution.coords)
        found.append({**clock.time(replay, job.seconds).as_dict(), "room": room})
    return {**found[0], "usual": found[1]}


def cold(job: Job) -> dict[str, Any]:
    """Seconds from before the implementation is imported to the first gradients, in a process that ran nothing else.

    Torch is ready: imported, its context made, a gradient of its own taken. For the first backward pass that begins at
    a given gradient it imports sympy, whoever's graph that is.
    """
    clock = clock_of(job.device)
    coords = cases.coordinates(job.case, job.device, job.shuffled)
    x, weight, grad = operands(len(coords), job.channels, job.dtype, job.device, job.kernel**3)
    torch.zeros_like(x[:1], requires_grad=True).abs().backward(grad[:1])
    clock.wait()

    def run() -> dict[str, Any]:
        kind = registry()[job.implementation]
        reason = kind.missing(job.device, job.dtype, job.kernel)
        if reason is not None:
            return {"status": "skipped", "reason": reason}
        convolution = kind(coords, job.channels, job.dtype, job.kernel)
        convolution.set_weight(weight)
        convolution.prepare()
        x.requires_grad_()
        _step(convolution, x, grad)()
        return {"status": "measured"}

    found: dict[str, Any] = {}
    ms = clock.once(lambda: found.update(run()))
    return job.as_dict() | found | ({"cold_s": ms / 1e3} if found["status"] == "measured" else {})


def run(job: Job) -> dict[str, Any]:
    """What a worker does with a job."""
    return cold(job) if job.quantities == (COLD,) else measure(job)


def with_quantities(job: Job, *quantities: str) -> Job:
    return replace(job, quantities=quantities)
