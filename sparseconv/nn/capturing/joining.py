"""Batch norms of torch that a run joins with what a client asks for after them: a sum with a residual, and a ReLU.

A first run is watched: what each norm's result goes into, by the calls that were made and by the gradient's graph.
Where that is a ReLU alone, or a sum that goes into a ReLU alone, later runs do all of it in the norm's node. In
inference a watched run with gradients tells, and norms that it asked for once have the same after them.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from sparseconv.nn.capturing.answer import Answer
from sparseconv.nn.capturing.values.given import CannotCapture

RELU = {torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_, torch.nn.functional.relu}
IN_PLACE = {torch.relu_, torch.Tensor.relu_}
SUM = {torch.add, torch.Tensor.add, torch.Tensor.add_, torch.Tensor.__add__, torch.Tensor.__iadd__}
#: what may be asked of a result that is not there yet
NAMES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "is_nested", "is_quantized", "is_meta")
FORM = {
    *(getattr(torch.Tensor, name).__get__ for name in NAMES),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__),
}
#: a norm over its live rows, given a residual, and whether a ReLU follows
Run = Callable[[torch.Tensor | None, bool], torch.Tensor]


class Joined(NamedTuple):
    """What a norm takes with it: a ReLU, and before that perhaps a sum with another tensor."""

    has_residual: bool


class Changed(CannotCapture):
    """A run asked for something else after a norm than the run that was watched."""

    def __init__(self) -> None:
        super().__init__("what follows its batch norms differs from call to call")


@dataclass
class _Result:
    """A result that is watched: its end of the gradient's graph, and what it was used for."""

    tensor: torch.Tensor
    node: Any
    uses: list[tuple[Any, Any]] = field(default_factory=list)


class Norms:
    """Norms one by one."""

    def norm(self, run: Run, input: torch.Tensor, key: int) -> torch.Tensor:
        """The norm's result, or what stands for it."""
        return run(None, False)

    def call(self, function: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """The result of a function, or what stands for it; None where it is to be called as it is."""
        return None

    def end(self) -> None:
        """The run is over."""


class Watched(Norms):
    """Norms one by one, and what follows each."""

    def __init__(self) -> None:
        self._norms: list[_Result] = []
        self._results: dict[int, _Result] = {}
        #: which norm it was: the address of its running mean, 0 for none
        self.keys: list[int] = []

    def norm(self, run: Run, input: torch.Tensor, key: int) -> torch.Tensor:
        self.keys.append(key)
        if id(input) in self._results:  # it may be read without a gradient
            self._results[id(input)].uses.append((torch.nn.functional.batch_norm, None))
        self._norms.append(self._noted(run(None, False)))
        return self._norms[-1].tensor

    def call(self, function: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        given = [self._results[id(a)] for a in (*args, *kwargs.values()) if id(a) in self._results]
        if not given or function in FORM:
            return None
        made = function(*args, **kwargs)
        self._results.pop(id(made), None)  # what an operation in place has made is no norm's result any more
        other = self._noted(made) if function in SUM and _is_sum_of_two(args, kwargs) else made
        for result in given:
            result.uses.append((function, other))
        return made

    def _noted(self, tensor: torch.Tensor) -> _Result:
        """A new result; by a number in place it is the old tensor with another end."""
        result = self._results[id(tensor)] = _Result(tensor, tensor.grad_fn)
        return result

    def joined(self, ends: Sequence[torch.Tensor]) -> list[Joined | None]:
        """By norm, what later runs may join; ``ends`` are the results of the run."""
        left = [t.grad_fn for t in ends if t.grad_fn is not None]
        seen, users = set(), Counter[Any](left)  # who called reads a result, too
        while left:
            node = left.pop()
            if node in seen:
                continue
            seen.add(node)
            following = [after for after, _ in node.next_functions if after is not None]
            users.update(following)
            left += following

        def alone(result: _Result) -> tuple[Any, Any] | None:
            return result.uses[0] if len(result.uses) == 1 and users[result.node] == 1 else None

        made, taken = list[Joined | None](), set()
        for norm in self._norms:
            use, has_residual = alone(norm), False
            if use is not None and isinstance(use[1], _Result) and id(use[1]) not in taken:
                taken.add(id(use[1]))  # by the first of two norms that are added
                use, has_residual = alone(use[1]), True
            made.append(Joined(has_residual) if use is not None and use[0] in RELU else None)
        self._norms.clear()
        self._results.clear()
        return made

    def foreseen(self, run: Callable[[Norms], Answer]) -> Norms | list[Joined | None]:
        """By norm of this run of inference, what later ones may join: by a ``run`` with gradients, given what watches.

        Where that fails, none joins anything; nor does a norm that either run asked for several times.
        """
        other = Watched()
        try:
            with torch.enable_grad():
                joined = other.joined(run(other).tensors)
        except Exception:  # nobody asked for this run: whatever fails in it is no failure of the capture
            return Norms()
        finally:
            gc.collect()  # maps and the gradient's graph hold one another, with all that this keeps
        here, there, told = Counter(self.keys), Counter(other.keys), dict(zip(other.keys, joined))
        return [told[key] if here[key] == there[key] == 1 else None for key in self.keys]


class Joining(Norms):
    """Norms one by one, each with what follows it.

    A norm with a residual waits for that: until its ReLU is asked for, a tensor that holds nothing stands for it. What
    the norm reads then must be as it was.
    """

    def __init__(self, joined: Sequence[Joined | None]) -> None:
        self._joined, self._number = joined, 0
        #: what stands for a norm, and for its sum: the norm, what it reads with versions, and its residual once known
        self._waiting: dict[int, tuple[torch.Tensor, Run, list[tuple[torch.Tensor, int]], list[torch.Tensor]]] = {}
        self._active: dict[int, torch.Tensor] = {}
        #: what stood for a norm whose ReLU was asked for, while somebody holds it: nobody may ask for it again
        self._done: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()

    def norm(self, run: Run, input: torch.Tensor, key: int) -> torch.Tensor:
        if self._number == len(self._joined) or any(id(input) in place for place in self._places()):
            raise Changed()
        joined = self._joined[self._number]
        self._number += 1
        if joined is None:
            return run(None, False)
        if joined.has_residual:
            y = torch.empty_like(input)
            self._waiting[id(y)] = y, run, [(input, input._version)], []
        else:
            y = run(None, True)
            self._active[id(y)] = y
        return y

    def call(self, function: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        given = [a for a in (*args, *kwargs.values()) if any(id(a) in place for place in self._places())]
        if not given or function in FORM:
            return None
        y = given[0]
        if len(given) == 1 and function in RELU and id(y) in self._active:
            del self._active[id(y)]
            if y.requires_grad or function in IN_PLACE or kwargs.get("inplace", args[1:] == (True,)):
                return y
            self._done[id(y)] = y
            return y.view_as(y)
        if len(given) == 1 and id(y) in self._waiting:
            _, run, read, residual = self._waiting[id(y)]
            if function in RELU and residual and all(t._version == version for t, version in read):
                self._done[id(y)] = self._waiting.pop(id(y))[0]
                return run(residual[0], True)
            if function in SUM and not residual and _is_sum_of_two(args, kwargs):
                residual.append(args[1] if args[0] is y else args[0])
                read.append((residual[0], residual[0]._version))
                return y
        raise Changed()

    def _places(self) -> tuple[Container[int], ...]:
        """The ids of tensors that hold no norm's result, though they stand for one."""
        return self._waiting, self._active, self._done

    def end(self) -> None:
        """Raises `Changed` where something that was joined was not asked for."""
        if self._waiting or self._active or self._number != len(self._joined):
            raise Changed()


def _is_sum_of_two(args: Any, kwargs: Any) -> bool:
    """Two tensors of one form, and nothing else."""
    if len(args) != 2 or kwargs or not all(isinstance(a, torch.Tensor) for a in args):
        return False
    one, other = args
    return one is not other and (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
