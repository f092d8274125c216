"""One job of a worker: what the package measures, and beside it captured maps, compilation, and first gradients."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.layers.captured import captured_map
from benchmarks.layers.peers import PEERS, Dense, Dictionary
from sparseconv.bench import cases
from sparseconv.bench.implementations import IMPLEMENTATIONS, by_name
from sparseconv.bench.measure import MAP, QUANTITIES, TIMERS, Job, Layer, Row, measure, operands
from sparseconv.bench.timing import clock_of

#: the package's implementations, dense convolution, a loop over a dictionary, and the peers
EVERYONE = by_name((*IMPLEMENTATIONS.values(), Dense, Dictionary, *PEERS))
#: a map by one graph that was captured before: a scene's coordinates copied in, the graph replayed
CAPTURED_MAP = "captured_map"
#: compile, and leave the compiled kernels in the caches
COMPILE = "compile"
#: seconds from before the library is imported to the first gradients of a fresh process, in which torch is ready
COLD = "cold"
ASKED = (MAP, CAPTURED_MAP, *QUANTITIES[1:])


def run(job: Job) -> Row:
    """What a worker does with a job."""
    return cold(job) if job.quantities == (COLD,) else measure(job, EVERYONE, WORK)


def _compile(layer: Layer) -> dict[str, Any]:
    with torch.no_grad():
        layer.convolution.forward(layer.x)
    layer.convolution.settle()
    layer.clock.wait()
    return {}


WORK = MappingProxyType({COMPILE: _compile, **TIMERS, CAPTURED_MAP: captured_map})


def cold(job: Job) -> Row:
    """Seconds from before the implementation is imported to the first gradients, in a process that ran nothing else.

    Torch is ready: imported, its context made, a gradient of its own taken. For the first backward pass that begins at
    a given gradient it imports sympy, whoever's graph that is.
    """
    clock = clock_of(job.device)
    coords = cases.coordinates(job.case, job.device, job.shuffled)
    x, weight, grad = operands(len(coords), job.channels, job.dtype, job.device, job.kernel**3)
    torch.zeros_like(x[:1], requires_grad=True).abs().backward(grad[:1])
    clock.wait()

    def first_gradients() -> dict[str, Any]:
        kind = EVERYONE[job.implementation]
        reason = kind.missing(job.device, job.dtype, job.kernel)
        if reason is not None:
            return {"status": "skipped", "reason": reason}
        convolution = kind(coords, job.channels, job.dtype, job.kernel)
        convolution.set_weight(weight)
        convolution.prepare()
        Layer(job, clock, convolution, x.requires_grad_(), weight, grad).step()
        return {"status": "measured"}

    found: dict[str, Any] = {}
    ms = clock.once(lambda: found.update(first_gradients()))
    return job.as_dict() | found | ({"cold_s": ms / 1e3} if found["status"] == "measured" else {})


def with_quantities(job: Job, *quantities: str) -> Job:
    return replace(job, quantities=quantities)
