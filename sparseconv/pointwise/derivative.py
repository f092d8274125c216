"""Gradients of a pointwise function from its declared derivatives, or through its twin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparseconv import transforms
from sparseconv.autograd_function import Function
from sparseconv.pointwise.evaluation import Evaluation, packed
from sparseconv.pointwise.schema import Derivative

if TYPE_CHECKING:
    from sparseconv.pointwise.kernel.plan import Plan


@dataclass(frozen=True)
class Recipe:
    """What to keep for the gradients of some arguments: positions of arguments and outputs, tensors apart from numbers.

    Position p stands for argument p, and position num_inputs + j for output j.
    """

    wanted: tuple[int, ...]
    tensors: tuple[int, ...]
    numbers: tuple[int, ...]
    names: tuple[str, ...]  # of the tensors, then of the numbers

    @staticmethod
    def of(function: Evaluation, needed: Sequence[bool]) -> Recipe:
        schema = function.schema
        names: dict[str, None] = {}
        if function.derivative is None:
            names = dict.fromkeys(f"in{i}" for i in range(schema.num_inputs))
        for i, derivative in (function.derivative or {}).items():
            if needed[i]:
                names.update(dict.fromkeys(name for name in derivative.arguments if not name.startswith("grad")))
        at = {name: int(name[2:]) if name[0] == "i" else schema.num_inputs + int(name[3:]) for name in names}
        tensors = [name for name, p in at.items() if p >= schema.num_inputs or schema.is_tensor[p]]
        numbers = [name for name in at if name not in tensors]
        return Recipe(
            tuple(i for i in schema.tensors if needed[i]),
            tuple(at[name] for name in tensors),
            tuple(at[name] for name in numbers),
            (*tensors, *numbers),
        )


def keep(
    ctx: Any,
    function: Evaluation,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    needed: tuple[bool, ...],
) -> None:
    """Save for the backward pass what the gradients asked for need, and no more."""
    recipe = function.recipes.get(needed)
    if recipe is None:
        recipe = function.recipes[needed] = Recipe.of(function, needed)
    values = (*inputs, *outputs)
    ctx.save_for_backward(*[values[p] for p in recipe.tensors])
    ctx.recipe = recipe
    ctx.numbers = [values[p] for p in recipe.numbers]
    ctx.forms = [(inputs[i].shape, inputs[i].dtype) for i in recipe.wanted]


def gradients(ctx: Any, function: Evaluation, grads: Sequence[Any]) -> list[Any]:
    """The gradient of every argument, None where there is none."""
    recipe = ctx.recipe
    values: dict[str, Any] = dict(zip(recipe.names, (*ctx.saved_tensors, *ctx.numbers)))
    values.update({f"grad{j}": g for j, g in enumerate(grads)})
    solve = through_twin if function.derivative is None else _declared
    found = solve(function, recipe.wanted, values)
    results: list[Any] = [None] * function.schema.num_inputs
    for i, (shape, dtype) in zip(recipe.wanted, ctx.forms):
        grad = found.get(i)
        if grad is not None:
            grad = _reduce(grad.real if grad.is_complex() and not dtype.is_complex else grad, shape)
            results[i] = grad if grad.dtype is dtype else grad.to(dtype)
    return results


def _declared(function: Evaluation, wanted: Sequence[int], values: dict[str, Any]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    computed: list[tuple[Derivative, Any]] = []  # arguments that share a derivative share its result
    for i in wanted:
        derivative = (function.derivative or {}).get(i)
        if derivative is None:
            continue
        known = next((grad for other, grad in computed if other is derivative), None)
        if known is None:
            known = derivative.function(*[values[name] for name in derivative.arguments])
            computed.append((derivative, known))
        found[i] = known
    return found


def through_twin(function: Evaluation, wanted: Sequence[int], values: dict[str, Any]) -> dict[int, Any]:
    """Each argument is one of its own, also where the caller made one of another."""
    args = [values[f"in{i}"] for i in range(function.schema.num_inputs)]
    run, places = _twin_of(function, args, wanted)
    moving = [args[i] for i in wanted]
    if torch.is_grad_enabled() or transforms.active():
        _, pull, *_ = torch.func.vjp(run, *moving)
        return dict(zip(wanted, pull(tuple(values[f"grad{j}"] for j in places))))
    with torch.enable_grad():
        moving = [t.detach().requires_grad_() for t in moving]
        outputs = run(*moving)
        pairs = [(y, values[f"grad{j}"]) for j, y in zip(places, outputs) if y.requires_grad]
        if not pairs:
            return {}
        grads = torch.autograd.grad([y for y, _ in pairs], moving, [g for _, g in pairs], allow_unused=True)
    return dict(zip(wanted, grads))


def _twin_of(
    function: Evaluation, args: Sequence[Any], moving: Iterable[int]
) -> tuple[Callable[..., tuple[torch.Tensor, ...]], list[int]]:
    """The twin as a function of some arguments, and which outputs it then gives: those that can have a derivative."""
    places: list[int] = []

    def run(*moved: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(moving, moved))
        outputs = function.twin([given.get(i, a) for i, a in enumerate(args)])
        places[:] = [j for j, y in enumerate(outputs) if y.is_floating_point() or y.is_complex()]
        return tuple(outputs[j] for j in places)

    return run, places


def _pushed(
    function: Evaluation, args: Sequence[Any], outputs: Sequence[torch.Tensor], along: dict[int, Any]
) -> list[Any]:
    """The tangent of each output, None where it has none, from those of some arguments.

    Without a gather, each output element depends on one element of each argument. So a gradient, without its sum over
    repeated axes, is the derivative times the output's gradient. The argument's tangent takes that place here. Of
    complex numbers it is the conjugate of the derivative, hence the two conjugates.
    """
    if function.reference is not None and (function.derivative is None or function.schema.gather):
        return _pushed_through_twin(function, args, along)
    if function.schema.gather or not function.differentiable:
        raise NotImplementedError(
            f"{function.schema.name} has no derivative in forward mode: declare reference=, its twin in torch"
        )
    values: dict[str, Any] = {f"in{i}": a for i, a in enumerate(args)} | {f"out{j}": y for j, y in enumerate(outputs)}
    tangents: list[Any] = []
    for j, y in enumerate(outputs):
        if not (y.is_floating_point() or y.is_complex()):
            tangents.append(None)
            continue
        total = torch.zeros_like(y)
        for i, tangent in along.items():
            grads = {f"grad{k}": torch.zeros_like(other) for k, other in enumerate(outputs)}
            grads[f"grad{j}"] = tangent.to(y.dtype).expand(y.shape).conj()
            found = _declared(function, (i,), values | grads).get(i)
            if found is not None:
                total = total + found.conj().to(y.dtype)
        tangents.append(total)
    return tangents


def _pushed_through_twin(function: Evaluation, args: Sequence[Any], along: dict[int, Any]) -> list[Any]:
    """`_pushed` by the gradient of the twin's gradient, which is linear in what stands for the outputs' gradients."""
    run, places = _twin_of(function, args, along)
    outputs, pull, *_ = torch.func.vjp(run, *(args[i] for i in along))
    _, push, *_ = torch.func.vjp(pull, tuple(map(torch.zeros_like, outputs)))
    (found,) = push(tuple(along.values()))
    tangents = dict(zip(places, found))
    return [tangents.get(j) for j in range(function.schema.num_outputs)]


def _reduce(grad: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Sum over the axes along which the argument was repeated."""
    return grad if grad.shape == shape else grad.sum_to_size(shape)


class Differentiable(Function):
    """One call of a pointwise function as a node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, function: Evaluation, plan: Plan | None, addresses: Any, numbers: Any, *args: Any) -> Any:
        ctx.function = function
        result = packed(function.evaluate(args)) if plan is None else plan.fresh(addresses, numbers)
        _finish(ctx, function, args, result, ctx.needs_input_grad[4:])
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, None, None, None, *gradients(ctx, ctx.function, grads))


class Transformed(Function):
    """The same node in the form that torch.func's transforms ask for, which costs the CPU several times more."""

    @staticmethod
    def forward(function: Evaluation, *args: Any) -> Any:
        return packed(function.evaluate(args))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.function, *args = inputs
        _finish(ctx, ctx.function, args, output, tuple(ctx.needs_input_grad[1:]))
        if transforms.forward_mode():
            tensors = ctx.function.schema.tensors
            ctx.save_for_forward(
                *(args[i] for i in tensors), *([output] if isinstance(output, torch.Tensor) else output)
            )
            ctx.args = [None if i in tensors else a for i, a in enumerate(args)]

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> Any:
        function, args, saved = ctx.function, list(ctx.args), list(ctx.saved_tensors)
        for i in function.schema.tensors:
            args[i] = saved.pop(0)
        along = {i: t for i, t in enumerate(tangents) if t is not None and (t.is_floating_point() or t.is_complex())}
        return packed(_pushed(function, args, saved, along))

    @staticmethod
    def vmap(info: Any, dims: Any, function: Evaluation, *args: Any) -> tuple[Any, Any]:
        """A batch of calls, for torch.func.vmap: one more axis in front of all others."""
        batched = {i: args[i].movedim(dim, 0) for i, dim in enumerate(dims[1:]) if dim is not None}
        rank = max(batched[i].ndim - 1 if i in batched else args[i].ndim for i in function.schema.tensors)

        def run(these: dict[int, torch.Tensor]) -> Any:
            return Transformed.apply(function, *(these.get(i, arg) for i, arg in enumerate(args)))

        narrow = rank and any(t.ndim == 1 for t in batched.values())  # of less say in the dtype than a vector has
        gathered = any(i in batched for pair in function.schema.gather for i in pair)  # whose first axis is theirs
        if narrow or gathered or function.schema.index:
            size = info.batch_size
            if size == 0:  # one item gives the shape
                batched = {i: t.new_zeros(1, *t.shape[1:]) for i, t in batched.items()}
            items = [run({i: t[item] for i, t in batched.items()}) for item in range(max(1, size))]
            several = not isinstance(items[0], torch.Tensor)
            found = tuple(torch.stack(same)[:size] for same in zip(*items)) if several else torch.stack(items)[:size]
        else:
            found = run({i: t.reshape(len(t), *(1,) * (rank + 1 - t.ndim), *t.shape[1:]) for i, t in batched.items()})
        return found, 0 if isinstance(found, torch.Tensor) else (0,) * len(found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, *gradients(ctx, ctx.function, grads))


def _finish(ctx: Any, function: Evaluation, inputs: Any, result: Any, needed: tuple[bool, ...]) -> None:
    outputs = (result,) if isinstance(result, torch.Tensor) else result
    keep(ctx, function, inputs, outputs, needed)
    if not all(y.is_floating_point() for y in outputs):
        ctx.mark_non_differentiable(*[y for y in outputs if not (y.is_floating_point() or y.is_complex())])
