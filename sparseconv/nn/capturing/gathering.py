"""Gradients of parameters, gathered by a graph in one array a dtype, so that a call copies them at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from sparseconv.nn.capturing.answer import CannotCapture
from sparseconv.plan.casting import gradients_into
from sparseconv.torch_private import copy_each, pieces


class Gathered:
    """The arrays for gradients such as were ``found`` once of ``parameters``, with None for those that have none."""

    def __init__(self, parameters: Sequence[torch.Tensor], found: Sequence[torch.Tensor | None]) -> None:
        self._count = len(parameters)
        #: of each dtype: which parameters have a gradient of it
        self._numbers: dict[torch.dtype, list[int]] = {}
        for number, grad in enumerate(found):
            if grad is not None:
                self._numbers.setdefault(grad.dtype, []).append(number)
        self._like = {dtype: [parameters[i] for i in numbers] for dtype, numbers in self._numbers.items()}
        self._flat = {
            dtype: torch.empty(sum(p.numel() for p in like), dtype=dtype, device=like[0].device)
            for dtype, like in self._like.items()
        }
        #: where each gradient belongs, by the parameters' numbers
        self._places = self._split(self._flat)

    def _split(self, flat: dict[torch.dtype, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {
            number: piece
            for dtype, numbers in self._numbers.items()
            for number, piece in zip(numbers, pieces(flat[dtype], self._like[dtype]))
        }

    def at_once(self) -> AbstractContextManager[None]:
        """Within it, what can write a gradient into its place does."""
        like = {n: p for dtype, numbers in self._numbers.items() for n, p in zip(numbers, self._like[dtype])}
        owners = Counter(p.data_ptr() for p in like.values())  # two may share their memory
        whole = {n: p.data_ptr() for n, p in like.items() if p.is_contiguous() and owners[p.data_ptr()] == 1}
        return gradients_into({at: self._places[n] for n, at in whole.items()})

    def fill(self, found: Sequence[torch.Tensor | None]) -> None:
        """Put the gradients that are not there into their places.

        Raises:
            CannotCapture: other parameters have a gradient than before, or one of another dtype.
        """
        dtypes = {n: dtype for dtype, numbers in self._numbers.items() for n in numbers}
        if dtypes != {n: grad.dtype for n, grad in enumerate(found) if grad is not None}:
            raise CannotCapture("which parameters have a gradient changes from call to call")
        for numbers in self._numbers.values():
            pairs = [(self._places[n], grad) for n in numbers if (grad := found[n]) is not None]
            pairs = [(place, grad) for place, grad in pairs if grad.data_ptr() != place.data_ptr()]
            with torch.no_grad():
                copy_each([place for place, _ in pairs], [grad for _, grad in pairs])

    def taken(self) -> list[torch.Tensor | None]:
        """The gradients in new tensors, by parameter."""
        found = self._split({dtype: flat.clone() for dtype, flat in self._flat.items()})
        return [found.get(number) for number in range(self._count)]
