"""What a function remembers of a geometry that it has met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparseconv.pointwise import metadata
from sparseconv.pointwise.kernel.launch import Launch
from sparseconv.pointwise.schema import Schema


@dataclass(frozen=True)
class Plan:
    """All that a further call of one geometry needs, which is to allocate and to launch.

    ``spans`` holds, for each tensor argument and then each output, the first and last byte that it reaches from its
    address; ``alike`` whether an argument has the geometry of the outputs, so that it may be one of them. Both are
    empty where outputs are new.
    """

    launch: Launch | None
    expected: metadata.Metadata
    device: torch.device
    spans: tuple[tuple[int, int], ...]
    alike: tuple[bool, ...]

    @staticmethod
    def make(
        schema: Schema,
        args: Sequence[Any],
        expected: metadata.Metadata,
        outputs: Sequence[Any],
        launch: Launch | None,
        *,
        given: bool,
    ) -> Plan:
        if not given:
            return Plan(launch, expected, outputs[0].device, (), ())
        arrays = [*(args[i] for i in schema.tensors), *outputs]
        spans = [(low - a.data_ptr(), high - a.data_ptr()) for a in arrays for low, high in [metadata.span(a)]]
        forms = [(a.shape, a.stride(), a.dtype) for a in arrays]
        count = len(schema.tensors)
        alike = tuple(all(form == other for other in forms[count:]) for form in forms[:count])
        return Plan(launch, expected, outputs[0].device, tuple(spans), alike)

    def fresh(self, addresses: Sequence[int], numbers: Sequence[Any]) -> Any:
        """New outputs, written from the tensors at these addresses."""
        expected, launch = self.expected, self.launch
        results = expected.dtypes.results
        if len(results) == 1:
            out = torch.empty_strided(expected.shape, expected.strides, dtype=results[0], device=self.device)
            if launch is not None:
                launch(addresses, numbers, (out.data_ptr(),))
            return out
        outputs = expected.allocate(self.device)
        if launch is not None:
            launch(addresses, numbers, [out.data_ptr() for out in outputs])
        return tuple(outputs)

    def separate(self, addresses: Sequence[int], outputs: Sequence[torch.Tensor]) -> bool:
        """Whether outputs at these addresses are clear of the arguments and of each other, or are an argument."""
        first = len(addresses)
        for j, out in enumerate(outputs):
            start = out.data_ptr()
            low, high = self.spans[first + j]
            for k, address in enumerate(addresses):
                begin, end = self.spans[k]
                meet = start + low <= address + end and address + begin <= start + high
                if meet and not (address == start and self.alike[k]):
                    return False
        return len(outputs) == 1

    def into(self, addresses: Sequence[int], numbers: Sequence[Any], outputs: Sequence[torch.Tensor]) -> Any:
        """Given outputs, written from the tensors at these addresses."""
        if self.launch is not None:
            self.launch(addresses, numbers, [out.data_ptr() for out in outputs])
        for out in outputs:
            torch.autograd.graph.increment_version(out)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
