"""Torch's own modules on rows of which only the first are voxels, and what no graph can hold."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sparseconv.nn.capturing.joining import FORM, Norms
from sparseconv.nn.capturing.reads import HERE
from sparseconv.nn.capturing.values.given import CannotCapture
from sparseconv.nn.fused.evaluation import evaluated_batch_norm
from sparseconv.nn.fused.training import batch_norm_of_rows
from sparseconv.ops.comparing import gap_of
from sparseconv.torch_private import TorchDispatchMode, add_each, pytree

#: functions without a file that are nobody's, which those of a prompt or a notebook are not
MADE = "<frozen", "<sparse product"
#: what tells a tensor's number of rows
ROWS = {getattr(torch.Tensor, name) for name in ("size", "__len__", "numel", "nelement")}
ROWS |= {getattr(torch.Tensor, name).__get__ for name in ("shape", "nbytes")}
#: operations that wait for the device, or whose results have a size that only the device knows
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "unique_dim")
#: the part of its norm by which a result may differ: sums run in another order
RESULTS = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}
APART = (
    "rows that are no voxels change its results ({}): each row must be worked on alone, or by this library's modules "
    "and torch's batch norm"
)
#: what rows that are no voxels hold, over the largest value of those that are
NOISE = 16.0, -48.0


class LiveRows(TorchFunctionMode):
    """Within it, torch's batch norm leaves out the rows that are no voxels, and takes with it what ``norms`` says.

    In evaluation, where it works on each row alone, it is one launch.

    Every grid of fixed size of one scene has a number of rows of its own, so rows tell whose they are. Norms count
    their batches together, at the end.
    """

    def __init__(self, family: Mapping[int, torch.Tensor], norms: Norms) -> None:
        super().__init__()
        self._family, self._norms = family, norms
        self._counted: dict[int, torch.Tensor] = {}

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if kind is None:
            self._count()
            self._norms.end()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, found = kwargs or {}, None
        if function is torch.nn.functional.batch_norm:
            found = self._batch_norm(*args, **kwargs)
        if found is None:
            found = self._norms.call(function, args, kwargs)
        if found is not None:
            return found
        if self._counted and any(id(a) in self._counted for a in (*args, *kwargs.values())):
            self._count()
        if function is torch.Tensor.add_ and _is_counter(*args):
            self._counted[id(args[0])] = args[0]
            return args[0]
        if isinstance(self._norms, Noise):
            args, kwargs = self._norms.given(function, args, kwargs, self._family)
        return function(*args, **kwargs)

    def _count(self) -> None:
        if self._counted:
            add_each(list(self._counted.values()), 1)
            self._counted.clear()

    def _batch_norm(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor | None:
        count = self._family.get(input.shape[0]) if input.ndim == 2 else None
        if count is None:
            return None
        if not (training or running_mean is None or running_var is None):
            run = partial(evaluated_batch_norm, input, weight, bias, running_mean, running_var, eps)
        elif training:
            moved = weight, bias, running_mean, running_var, momentum, eps
            run = partial(batch_norm_of_rows, input, count, *moved)
        else:
            return None
        return self._norms.norm(run, input, 0 if running_mean is None else running_mean.data_ptr())


def _is_counter(counter: Any, step: Any) -> bool:
    """Whether one is added to a number, as a norm counts its batches."""
    return type(step) is int and step == 1 and counter.ndim == 0 and counter.dtype == torch.int64


class Noise(Norms):
    """What clients' own operations are given has other values in the rows that are no voxels.

    Args:
        by: these values, over the largest of the rows that are voxels.
        own: storages of the module's tensors, by address, whose rows are no voxels even where they are as many.
    """

    def __init__(self, by: float, own: set[int]) -> None:
        self._by, self._own = by, own

    def given(self, function: Any, args: Any, kwargs: Any, family: Mapping[int, torch.Tensor]) -> Any:
        """The arguments, copied where they have such rows; not what is written, nor for this library's operations."""
        name = getattr(function, "__name__", "")
        writes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
        if function in FORM or name == "__get__" or "out" in kwargs or _place() is None:
            return args, kwargs

        def noisy(t: Any) -> Any:
            if not isinstance(t, torch.Tensor) or not t.ndim or not t.is_floating_point() or not t.numel():
                return t
            count = family.get(len(t))
            if count is None or t.untyped_storage().data_ptr() in self._own:
                return t
            real, rest = t.tensor_split([int(count)])
            largest = real.detach().abs().amax() if real.numel() else 1.0
            return torch.cat([real, torch.full_like(rest, self._by) * (1 + largest)])

        first = 1 if writes else 0
        made = pytree.tree_map(noisy, (args[first:], kwargs))
        return (*args[:first], *made[0]), made[1]


def keep_apart(
    run: Callable[[Noise], Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor], buffers: Sequence[str]
) -> None:
    """Raise `CannotCapture` where results depend on rows that are no voxels, in a run that draws the same numbers.

    The last results are what is left in ``buffers``.
    """
    own = {t.untyped_storage().data_ptr() for t in tensors}
    one, other = (run(Noise(by, own)) for by in NOISE)
    gap = off(list(map(gap_of, one, other)), list(map(result_limit, other)), buffers)
    if gap is not None:
        raise CannotCapture(APART.format(gap))


class _Watching(TorchDispatchMode):
    """A mode that torch's compiler need not know of: else each call would import that, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Guard(_Watching):
    """Within it, what no graph can hold raises `CannotCapture` and says where it is.

    Args:
        before: storages of tensors that were made before the region, by address: a replay would read old values.
        device: that of the scene.
    """

    def __init__(self, before: Mapping[int, str], device: torch.device) -> None:
        super().__init__()
        self._before, self._device = before, device
        self._rows = _RowsRead(self._made_before)

    def __enter__(self) -> Guard:
        self._rows.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._rows.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        there = [t for t in tensors if t.device == self._device]
        place = _place() if tensors else None
        if place is not None:
            if name in WAITS and there:
                raise CannotCapture(f"{name} waits for the device, {place}")
            for t in tensors:  # those on the host, too, whose values a graph would hold
                what = self._made_before(t)
                if what is not None:
                    raise CannotCapture(f"{name} reads {what}, {place}")
        found = function(*args, **kwargs)
        copied = place is not None and there and name in ("_to_copy", "copy_") and isinstance(found, torch.Tensor)
        if copied and found.device.type != self._device.type:
            raise CannotCapture(f"a tensor is copied to the host, {place}")
        return found

    def _made_before(self, t: torch.Tensor) -> str | None:
        what = self._before.get(t.untyped_storage().data_ptr()) if t.numel() else None
        return None if what is None else f"{what} {tuple(t.shape)}, made before the region"

    def check(self, results: Iterable[torch.Tensor]) -> None:
        """Raise `CannotCapture` where one of the results is no result of the region."""
        for t in results:
            what = self._made_before(t)
            if what is not None:
                raise CannotCapture(f"it returns {what}")


class _RowsRead(TorchFunctionMode):
    """Within it, asking for the number of rows of a tensor that was ``made_before`` raises `CannotCapture`."""

    def __init__(self, made_before: Callable[[torch.Tensor], str | None]) -> None:
        super().__init__()
        self._made_before = made_before

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in ROWS and not (function is torch.Tensor.size and args[1:] and args[1] % max(1, args[0].ndim)):
            place, what = _place(), self._made_before(args[0])
            if place is not None and what is not None:
                raise CannotCapture(f"it asks for the rows of {what}, {place}")
        return function(*args, **(kwargs or {}))


class Breaker(_Watching):
    """Within it, the first operation that breaks off the capture of the current stream is found, and where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = function(*args, **(kwargs or {}))
            torch.cuda.Event().record()  # an error where the capture was broken off
        except RuntimeError:
            name, place = function.overloadpacket.__name__, _place() or "in this library"
            self.found = self.found or f"{name} cannot be in a graph, {place}"
            raise
        return result


class Seen(_Watching):
    """Within it, the tensors that operations make are noted: those that come before a region."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self.made += [t for t in pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
        return found


def _place() -> str | None:
    """Where in the caller's files an operation is; None where this library asks for it, whose replays are its own."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and "/torch/" not in name and not name.startswith(MADE):
            if name.startswith(HERE):
                return None
            line = linecache.getline(name, frame.f_lineno).strip()
            return f"at {Path(name).name}:{frame.f_lineno}: {line}"
        frame = frame.f_back
    return None


def result_limit(result: torch.Tensor) -> float:
    """The part of its norm by which a result may differ."""
    return RESULTS.get(result.dtype, 0.0)


def off(gaps: Sequence[float], limits: Sequence[float], buffers: Sequence[str] = ()) -> str | None:
    """The first difference that is more than rounding, in words; the last ones are those of ``buffers``."""
    results = len(gaps) - len(buffers)
    for number, (gap, limit) in enumerate(zip(gaps, limits)):
        if not gap <= limit:
            what = f"result {number}" if number < results else f"buffer {buffers[number - results]}"
            return f"{what} by {gap:.2g} of its norm"
    return None
