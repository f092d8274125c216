"""The 8-bit copy of a network."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from sparseconv.backends.registry import backend
from sparseconv.quantization.layers import Convolution, Step, Wide
from sparseconv.quantization.recording import filled, refs_in
from sparseconv.tensor import SparseTensor


class QuantizedNetwork(torch.nn.Module):
    """What `quantize` returns: a list of steps over integers, called as the network was.

    It takes the network's input, a `SparseTensor` in floating point, and returns what the network returns, in fp32.
    Its weights are int8 and its biases int32, buffers of its ``state_dict``. It copies, pickles and moves as any.
    It has no parameters and no gradient.

    Attributes:
        steps: the steps in their order.
        wide: the names of the layers that compute in floating point, as they did.

    Without ``wide`` layers the same input gives the same bytes on every device, backend and number of threads.

    >>> import sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(100, 3), voxel_size=0.2)
    >>> x = sc.SparseTensor(grid, torch.randn(len(grid), 4))
    >>> small = sc.quantize(sc.nn.ConvBlock(4, 8).eval(), [x])
    >>> [step.kind for step in small.steps]
    ['quantize', 'convolution', 'dequantize']
    """

    def __init__(self, steps: list[Step], results: Any) -> None:
        super().__init__()
        self.steps, self.results = torch.nn.ModuleList(steps), results
        self.eval()

    @property
    def wide(self) -> tuple[str, ...]:
        """The names of the layers that were left as they were."""
        return tuple(step.name for step in self.steps if isinstance(step, Wide))

    def use_backend(self, name: str) -> QuantizedNetwork:
        """Let one backend, by its name, compute every convolution; ``"auto"`` for what each layer says. Returns itself.

        Its results are the same bytes with any.
        """
        if name != "auto":
            backend(name)
        for step in self.steps:
            if isinstance(step, Convolution):
                step.backend = name
        return self

    def forward(self, x: SparseTensor) -> Any:
        """The network's result for a scene, in fp32.

        Raises:
            TypeError: no `SparseTensor` of floating point. RuntimeError: a gradient is asked for.
        """
        if not isinstance(x, SparseTensor) or not x.dtype.is_floating_point:
            raise TypeError(f"a quantized network takes a SparseTensor in floating point; got {_named(x)}")
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError(
                "a quantized network has no gradient: rounding to integers has none. Pass x.detach(), or train the "
                "network that it was made of"
            )
        with torch.no_grad():
            return self._run(x)

    def _run(self, x: SparseTensor) -> Any:
        values: dict[int, Any] = {0: x}
        last = self._last_uses()
        steps: list[Any] = list(self.steps)
        for place, step in enumerate(steps):
            values[step.output] = step.run(values)
            for slot in last.get(place, ()):
                del values[slot]
        return filled(self.results, lambda ref: values[ref.value])

    def _last_uses(self) -> dict[int, list[int]]:
        """The slots that nobody reads after each step."""
        last: dict[int, int] = {}
        steps: list[Any] = list(self.steps)
        for place, step in enumerate(steps):
            for slot in (*step.inputs, *getattr(step, "where", {}).values(), step.output):
                last[slot] = place
        kept = {ref.value for ref in refs_in(self.results)}
        freed: dict[int, list[int]] = {}
        for slot, place in last.items():
            if slot not in kept:
                freed.setdefault(place, []).append(slot)
        return freed

    def extra_repr(self) -> str:
        counts = Counter(step.kind for step in self.steps)
        return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _named(x: Any) -> str:
    return f"a SparseTensor of {x.dtype}" if isinstance(x, SparseTensor) else type(x).__name__
