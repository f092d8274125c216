"""One side of `benchmarks.revisions`: a process that imports one checkout, and measures what it is told.

    python worker.py CHECKOUT       # orders on stdin, answers on stdout, one JSON object a line

This file serves every revision, so it uses only what all have: grids, plans, ``execute``, captured networks, and the
`sparseconv.bench` of the checkout. That knows which parts of a map a step uses.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import torch

IN, CLASSES = 4, 20
#: of the loss, so that gradients in fp16 are no subnormal numbers
SCALE = 2.0**10


class Layer:
    """A submanifold 3x3x3 convolution with its operands, after two steps: all is compiled, all is chosen."""

    def __init__(self, order: dict[str, Any], coords: torch.Tensor) -> None:
        implementations = import_module("sparseconv.bench.implementations")
        operands = import_module("sparseconv.bench.measure").operands
        channels, self.dtype, device = order["channels"], order["dtype"], order["device"]
        self.x, self.weight, self.grad = operands(len(coords), channels, self.dtype, device)
        self.x.requires_grad_()
        self.convolution = implementations.Sparseconv(coords, channels, self.dtype)
        self.convolution.set_weight(self.weight)
        for _ in range(2):  # the first map has what was tried beside what was chosen
            self.convolution.prepare()
            self.step()
        self.convolution.learn()
        self.convolution.settle()
        self.step()  # on the map that `settle` made

    def step(self) -> torch.Tensor:
        """Forward and both gradients through autograd."""
        self.x.grad = self.convolution.weight.grad = None
        y = self.convolution.forward(self.x)
        y.backward(self.grad)
        return y

    def call(self, quantity: str) -> tuple[Callable[[], object], dict[str, Any]]:
        """What is timed, and what is said of its values."""
        if quantity == "eager_map":
            return self.convolution.prepare, {"map": list(self.convolution._used)}
        if quantity == "captured_map":
            captured = _captured_map()(self.convolution, 1.0)
            fault = captured.wrong(self.x, self.weight, self.grad, self.dtype)
            if fault is not None:
                raise ValueError(fault)
            return functools.partial(captured, self.convolution.coords), {}
        y = self.step()
        bits = {"y": digest(y), "x.grad": digest(self.x.grad), "weight.grad": digest(self.convolution.weight.grad)}
        return {"forward": lambda: self.convolution.forward(self.x), "step": self.step}[quantity], {"bits": bits}


def _captured_map() -> Any:
    """The map of a layer in a graph: in the package until benchmarks had a folder for it."""
    try:
        return import_module("benchmarks.layers.captured").CapturedMap
    except ModuleNotFoundError:
        return import_module("sparseconv.bench.captured").CapturedMap


class Network:
    """A U-Net on one scene, its maps built anew by each call."""

    def __init__(self, order: dict[str, Any], coords: torch.Tensor) -> None:
        sc, nn = import_module("sparseconv"), import_module("sparseconv.nn")
        dtype = torch.float16 if order["dtype"] == "fp16" else torch.float32
        torch.manual_seed(0)
        self.network = nn.UNet(IN, CLASSES, tuple(order["widths"])).to(device=order["device"], dtype=dtype)
        self.state = copy.deepcopy(self.network.state_dict())
        made = torch.Generator().manual_seed(0)
        self.coords = coords
        self.x = torch.randn(len(coords), IN, generator=made).to(coords.device, dtype)
        self.labels = torch.randint(0, CLASSES, (len(coords),), generator=made).to(coords.device)
        self.scene = lambda: sc.SparseTensor(sc.VoxelGrid(coords), self.x)
        self.capture, self.capture_step = nn.capture, nn.capture_step

    def call(self, quantity: str) -> tuple[Callable[[], object], dict[str, Any]]:
        """What is timed, and what is said of its values."""
        if quantity == "captured_step":
            self.network.train()
            step = self.capture_step(self.network, loss, self.scene(), self.labels)
            value = float(step((self.coords, self.x), self.labels)) / SCALE
            step.check()
            if not 1.5 < value < 6.0:  # an untrained network guesses: log(20) is 3.0
                raise ValueError(f"the loss of an untrained network is {value:.3g}")
            return functools.partial(step, (self.coords, self.x), self.labels), {"loss": value}
        self.network.load_state_dict(self.state)  # running statistics tell how many steps were timed
        self.network.eval()
        fast = self.capture(self.network, self.scene())
        y = fast((self.coords, self.x))
        fast.check()
        y = getattr(y, "features", y)
        return functools.partial(fast, (self.coords, self.x)), {
            "bits": {"y": digest(y)},
            "norm": float(y.float().norm()),
        }


def loss(y: Any, targets: torch.Tensor) -> torch.Tensor:
    return SCALE * torch.nn.functional.cross_entropy(y.features.float(), targets)


def digest(values: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    array = values.detach().contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.sha256(array.data).hexdigest()[:16]


def coordinates(order: dict[str, Any]) -> torch.Tensor:
    """(N, 4) int32 on the device."""
    return torch.from_numpy(np.load(order["file"])).to(order["device"])


@contextlib.contextmanager
def on_the_quickest_core() -> Iterator[None]:
    """All threads of this process on the core where Python runs fastest now. On Linux."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    pace, paces = import_module("sparseconv.bench.timing").pace, dict[int, float]()
    allowed = os.sched_getaffinity(0)
    try:
        for core in allowed:
            os.sched_setaffinity(0, {core})
            paces[core] = pace()
        _move({min(allowed, key=lambda core: paces[core])})
        yield
    finally:
        _move(allowed)


def _move(cores: set[int]) -> None:
    """Let this process's threads run on these cores alone."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread may end meanwhile
            os.sched_setaffinity(int(thread), cores)


class Worker:
    """Orders and their answers. A layer or network is kept until another is asked for."""

    def __init__(self) -> None:
        self._shape: Any = None
        self._subject: Layer | Network | None = None
        self._call: Callable[[], object] = list

    def hello(self, order: dict[str, Any]) -> dict[str, Any]:
        """Which package it imports."""
        import sparseconv

        return {"package": os.path.dirname(sparseconv.__file__), "torch": torch.__version__}

    def prepare(self, order: dict[str, Any]) -> dict[str, Any]:
        """Compile, choose and check what the cell will time."""
        clock, self._call = self._clock(order), list
        shape = (order["kind"], order["case"], order["channels"])
        began = time.perf_counter()
        if shape != self._shape:
            self._subject, self._shape = None, shape
            gc.collect()
            torch.cuda.empty_cache()  # the other side needs memory, too
            self._subject = (Layer if order["kind"] == "layer" else Network)(order, coordinates(order))
        assert self._subject is not None
        self._call, said = self._subject.call(order["quantity"])
        clock.wait()
        return said | {"prepared_s": round(time.perf_counter() - began, 2)}

    def time(self, order: dict[str, Any]) -> dict[str, Any]:
        """Milliseconds of the cell: median and spread of one round."""
        place = on_the_quickest_core() if order["device"] == "cuda" else contextlib.nullcontext()
        with place, torch.set_grad_enabled(order["quantity"] != "forward"):
            return self._clock(order).time(self._call, order["seconds"]).as_dict()

    def first_gradient(self, order: dict[str, Any]) -> dict[str, Any]:
        """Seconds from before the package is imported to the first gradients.

        Torch is ready: its context is made, and one gradient of its own was taken.
        """
        coords = coordinates(order)
        dtype = torch.float16 if order["dtype"] == "fp16" else torch.float32
        x, grad = (torch.randn(len(coords), order["channels"], device=coords.device, dtype=dtype) for _ in range(2))
        weight = torch.randn(27, order["channels"], order["channels"], device=coords.device, dtype=dtype)
        torch.zeros_like(x[:1], requires_grad=True).abs().backward(grad[:1])
        x.requires_grad_()
        weight.requires_grad_()
        wait = torch.cuda.synchronize if coords.is_cuda else list
        wait()
        began = time.perf_counter()
        import sparseconv as sc

        sc.ConvolutionPlan(sc.VoxelGrid(coords), 3).execute(x, weight).backward(grad)
        wait()
        found = time.perf_counter() - began
        if not all(bool(t.grad.isfinite().all()) for t in (x, weight) if t.grad is not None):
            raise ValueError("the first gradients are not finite")
        return {"seconds": found, "pace": import_module("sparseconv.bench.timing").pace()}

    @staticmethod
    def _clock(order: dict[str, Any]) -> Any:
        return import_module("sparseconv.bench.timing").clock_of(order["device"])

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            return getattr(self, order["do"])(order)
        except Exception as error:  # a revision may fail in any way
            words = str(error).strip().splitlines() or [""]
            return {"error": f"{type(error).__name__}: {words[0]}"[:300]}


def main() -> None:
    sys.path[0] = sys.argv[1]  # in place of this file's folder
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    worker = Worker()
    for line in sys.stdin:
        answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
