"""One job measured: an implementation, a case, channels, a dtype, an order of rows, and the quantities asked for.

Nothing is timed before its values are checked, and a value that is off leaves a sentence in place of every figure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch

from sparseconv.bench import cases, check
from sparseconv.bench.implementations import IMPLEMENTATIONS, Convolution, Implementations
from sparseconv.bench.timing import DTYPES, Clock, Samples, Spread, clock_of, precision

#: from coordinates to everything that a training step needs
MAP = "map"
#: forward alone; each gradient alone; forward and both gradients through autograd, as a user calls it
FORWARD, INPUT_GRAD, WEIGHT_GRAD, STEP = "forward", "input_grad", "weight_grad", "step"
#: most bytes that a step holds beyond what is held between steps (operands, map, the last step's gradients)
MEMORY = "memory"
QUANTITIES = (MAP, FORWARD, INPUT_GRAD, WEIGHT_GRAD, STEP, MEMORY)


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
    def of(cls, data: Mapping[str, Any]) -> Job:
        """The job that a row of results was measured for, or that `as_dict` wrote."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__} | {"quantities": (*data["quantities"],)})

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Layer:
    """A convolution whose values are right, with its operands: x (N, C), weight (K, C, C), grad (N, C)."""

    job: Job
    clock: Clock
    convolution: Convolution
    x: torch.Tensor
    weight: torch.Tensor
    grad: torch.Tensor

    def step(self) -> None:
        """Forward and both gradients through autograd."""
        self.x.grad = self.convolution.weight.grad = None
        self.convolution.forward(self.x).backward(self.grad)

    def anew(self) -> None:
        """The map from the coordinates, and a step on it."""
        self.convolution.prepare()
        self.step()

    def time(self, call: Callable[[], object]) -> dict[str, Any]:
        return self.clock.time(call, self.job.seconds).as_dict()


Row = dict[str, Any]
Timers = Mapping[str, Callable[[Layer], dict[str, Any]]]


def measure(job: Job, known: Implementations = IMPLEMENTATIONS, timers: Timers | None = None) -> Row:
    """A row of results: the job, N, P, and under each quantity its figures; or ``reason`` where there are none.

    Args:
        job: what to measure.
        known: the implementations there are.
        timers: what finds each quantity, in the order in which they are asked; default: `TIMERS`.
    """
    row: Row = job.as_dict()
    reason = cases.missing(job.case)
    if reason is None and job.implementation not in known:
        reason = f"no implementation {job.implementation!r}; there are {', '.join(known)}"
    if reason is None:
        reason = known[job.implementation].missing(job.device, job.dtype, job.kernel)
    if reason is not None:
        return row | {"status": "skipped", "reason": reason}
    with precision(job.dtype):
        try:
            return row | _measured(job, known[job.implementation], timers or TIMERS)
        except (MemoryError, torch.OutOfMemoryError) as error:
            return row | {"status": "skipped", "reason": f"out of memory: {str(error).splitlines()[0]}"}


def attempt(job: Job, run: Callable[[Job], Row] = measure) -> Row:
    """The row that ``run`` finds, or one that says how it failed: others are still to be measured."""
    try:
        return run(job)
    except Exception as error:  # an implementation may fail in any way
        words = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {words[0] if words else ''}"[:300]
        return job.as_dict() | {"status": "failed", "reason": reason}


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


def _measured(job: Job, kind: type[Convolution], timers: Timers) -> Row:
    clock = clock_of(job.device)
    coords = cases.coordinates(job.case, job.device, job.shuffled)
    neighbours, pairs = _neighbours(job.case, job.device, job.shuffled, job.kernel)
    x, weight, grad = operands(len(coords), job.channels, job.dtype, job.device, job.kernel**3)
    convolution = kind(coords, job.channels, job.dtype, job.kernel)
    convolution.set_weight(weight)
    layer = Layer(job, clock, convolution, x.requires_grad_(), weight, grad)
    first = clock.once(layer.anew)
    layer.anew()  # on a map of its own: the first step's has what was tried beside what was chosen
    convolution.learn()
    row: Row = {"status": "measured", "voxels": len(coords), "pairs": pairs, "first_s": first / 1e3}
    verdict = check.judge(neighbours, x.detach(), weight, grad, _results(layer), job.dtype, convolution.slack)
    row["errors"] = verdict.errors
    if verdict.fault is not None:
        return row | {"status": "wrong", "reason": verdict.fault}
    for quantity, timer in timers.items():
        if quantity in job.quantities:
            row[quantity] = timer(layer)
    convolution.prepare()
    with torch.no_grad():
        convolution.forward(x)
    row["details"] = convolution.details()
    return row


def _results(layer: Layer) -> dict[str, torch.Tensor]:
    """The values of a forward and of both gradients."""
    convolution, x, threads = layer.convolution, layer.x, torch.get_num_threads()
    if convolution.unsteady:
        torch.set_num_threads(1)
        convolution.prepare()
    convolution.weight.grad = x.grad = None
    y = convolution.forward(x)
    y.backward(layer.grad)
    torch.set_num_threads(threads)
    assert x.grad is not None
    return {"forward": y.detach(), "input_grad": x.grad, "weight_grad": convolution.weight_grad().detach()}


def _forward(layer: Layer) -> dict[str, Any]:
    with torch.no_grad():
        return layer.time(lambda: layer.convolution.forward(layer.x))


def _one_gradient(layer: Layer, of_weight: bool) -> dict[str, Any]:
    """One gradient by autograd, the other not asked for."""
    convolution = layer.convolution
    if not convolution.apart:
        return {"reason": "finds both gradients whichever is asked for"}
    convolution.weight.requires_grad_(of_weight)
    source = layer.x.detach() if of_weight else layer.x
    y = convolution.forward(source)
    wanted = convolution.weight if of_weight else source
    found = layer.time(lambda: torch.autograd.grad(y, wanted, layer.grad, retain_graph=True))
    convolution.weight.requires_grad_(True)
    return found


def _memory(layer: Layer) -> dict[str, Any]:
    layer.step()
    peak = layer.clock.peak(layer.step)
    return {"peak_mib": None if peak is None else peak / 2**20}


def _map(layer: Layer) -> dict[str, Any]:
    """What `prepare` takes where it makes all of the map; else what a step on new coordinates takes beyond a step.

    That difference stands beside it in any case: it has the CPU's work of a first launch, too. A map takes no less
    than its `prepare`; a difference of two noisy times may, down to nothing. `prepare` is repeated in three parts,
    between the others: a CPU that has something else to do for a second does not set the median.
    """
    clock, convolution, seconds = layer.clock, layer.convolution, layer.job.seconds
    convolution.settle()

    def part() -> Samples:
        return clock.samples(convolution.prepare, seconds / 3)

    samples = part()
    plain = clock.time(layer.step, seconds)
    samples += part()
    both = clock.time(layer.anew, seconds)
    alone = Spread.of(samples + part())
    found: dict[str, Any] = {"prepare": alone.as_dict()}
    gap = {"median": max(0.0, both.median - plain.median), "repeats": both.repeats, "pace": max(both.pace, plain.pace)}
    found["in_step"] = gap
    if convolution.lazy and gap["median"] > alone.median:
        return found | {**gap, "by": "in_step"}
    return found | {**alone.as_dict(), "by": "prepare"}


#: what finds each quantity: without a gradient first, then with
TIMERS: Timers = MappingProxyType(
    {
        FORWARD: _forward,
        INPUT_GRAD: functools.partial(_one_gradient, of_weight=False),
        WEIGHT_GRAD: functools.partial(_one_gradient, of_weight=True),
        STEP: lambda layer: layer.time(layer.step),
        MEMORY: _memory,
        MAP: _map,
    }
)
