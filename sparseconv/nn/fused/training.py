"""Layers of convolution, batch norm and activation, with a residual, as one graph node in training.

    y = act(norm(conv(x)) + residual),    act(z) = z for z > 0 and slope * z elsewhere
    y = act(norm(conv(act(norm(conv(x))))) + residual)

Every node is a call from torch's engine into Python, which costs the CPU as much as two launches or more.

Kept for the gradients: x, the convolution's result z, and two numbers per channel. With a residual y is kept as well,
since z alone does not give the sign of the activation's input. Large tensors that can be recomputed are not kept.
z's gradient is written over z.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sparseconv.autograd import adjoint, adjoint_onto, convolution, weight_gradient
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu.streams import current, forget_workspaces
from sparseconv.nn.fused import normalize
from sparseconv.nn.fused.evaluation import lined_up, reads, tensors_of
from sparseconv.nn.fused.live_rows import live_rows, over_live_rows
from sparseconv.nn.fused.normalize import Norm
from sparseconv.nn.fused.remaking import Recipe, is_large, maker_of, makes_again, recipe_of, versions, without
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.torch_private import keeps_graph, others_save

#: channels up to which an input gradient is written onto another: at 128 its kernel would take 236 registers, not 162,
#: and a multiprocessor would hold two programs, not three
MOST_ONTO = 64
#: numbers of a tap's weight up to which its gradient is summed beside other gradients
MOST_ASIDE = 128 * 128


class Call(NamedTuple):
    """What of a plan the convolution in a node needs; it keeps the map alive and not the plan's grids."""

    kernel_map: KernelMap
    groups: int
    backend: str

    @staticmethod
    def of(plan: ConvolutionPlan) -> Call:
        return Call(plan.kernel_map, plan.groups, plan.backend)


class Layer(NamedTuple):
    """A norm, the slope below zero of its activation (0: relu, 1: none), and the convolution before it, if any."""

    norm: torch.nn.BatchNorm1d
    slope: float = 1.0
    plan: ConvolutionPlan | None = None
    taps: torch.Tensor | None = None  # (K, C_in/G, C_out)
    alive: torch.Tensor | None = None  # (1,) int32: the rows that are, of a grid that has others too


class Stage(NamedTuple):
    """What of a `Layer` is no tensor with a gradient."""

    norm: Norm
    call: Call | None

    def convolve(self, x: torch.Tensor, taps: torch.Tensor | None) -> torch.Tensor:
        call = self.call
        if call is None or taps is None:
            return x
        return convolution(x, taps, None, call.kernel_map, call.groups, call.backend)


@makes_again
class _Trained(torch.autograd.Function):
    """The node: layer after layer, each with the tensors (taps, weight, bias); the residual joins the last."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        stages: tuple[Stage, ...],
        source: Any,
        *tensors: Any,
    ) -> torch.Tensor:
        y, last = x, len(stages) - 1
        middles: list[torch.Tensor | None] = []  # results of the convolutions, results of the layers but the last
        results: list[torch.Tensor | None] = []
        statistics: list[torch.Tensor] = []
        for at, stage in enumerate(stages):
            taps, weight, bias = tensors[3 * at : 3 * at + 3]
            z = stage.convolve(y, taps)
            if stage.call is not None and ctx.needs_input_grad[4 + 3 * at]:
                stage.call.kernel_map.list_pairs()
            del y  # before there is another one
            y, kept = normalize.forward(z, weight, bias, residual if at == last else None, stage.norm)
            middles.append(None if stage.call is None else z)
            statistics.append(kept)
            if at < last:
                results.append(None if is_large(y, stage.norm.alive is not None) else y)
        joined = residual is not None and stages[last].norm.slope != 1
        ctx.save_for_backward(x, y if joined else None, *tensors, *middles, *statistics, *results)
        ctx.stages, ctx.source = stages, source
        #: whether no saved-tensor hook holds what was saved, so that it may be overwritten
        ctx.own = source is not None or not others_save()
        ctx.around = residual is x and stages[last].norm.alive is not None and x.shape[1] <= MOST_ONTO
        ctx.recipe = None
        if residual is None:
            ctx.recipe = Recipe(z, weight, bias, kept, stages[last].norm, versions(weight, bias))
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        (x, y, *saved), stages, needs = ctx.saved_tensors, ctx.stages, ctx.needs_input_grad
        count, source, last_time = len(stages), ctx.source, not keeps_graph()
        streams = current()
        if streams is not None:
            forget_workspaces()  # of linear layers: their memory then serves what comes between them
        tensors, middles = saved[: 3 * count], saved[3 * count : 4 * count]
        statistics, results = saved[4 * count : 5 * count], saved[5 * count :]
        if torch.is_grad_enabled():
            return _differentiable(grad, x, y, stages, tensors, needs[1])
        if last_time:
            ctx.recipe = None  # its users' backward passes run before this one
        grads: list[Any] = [None] * (3 * count)
        grad_residual = None
        for at in reversed(range(count)):
            (norm, call), z = stages[at], middles[at]
            taps, weight, bias = tensors[3 * at : 3 * at + 3]
            if at == 0 and z is None and source is not None:
                x = recipe_of(source).run()
            overwrite = z is not None and last_time and ctx.own
            dz, grads[3 * at + 1], grads[3 * at + 2], dres = normalize.backward(
                grad, x if z is None else z, y, weight, bias, statistics[at], norm, overwrite
            )
            if at == count - 1:
                if needs[1]:
                    grad_residual = dres
                    if dres is grad and norm.alive is not None:
                        grad_residual = torch.where(live_rows(grad, norm.alive), grad, 0)
                y = None
            grad = dz
            del dres
            if call is None:
                break
            edges = call.kernel_map, call.groups, call.backend
            if needs[4 + 3 * at]:  # first: its partial sums then lie where the input gradient will be
                if at == 0 and source is not None:
                    if streams is not None:  # what sums on the side stream read makes room for what is made next
                        streams.catch_up()
                    if last_time and ctx.own:
                        _let_go(middles[1:])  # read for the last time; the node holds them until it ends
                    flow = recipe_of(source).run()
                elif at == 0:
                    flow = x
                elif results[at - 1] is not None:
                    flow = results[at - 1]
                else:  # too large to have been kept
                    weight, bias = tensors[3 * at - 2 : 3 * at]
                    flow = normalize.again(middles[at - 1], weight, bias, statistics[at - 1], stages[at - 1].norm)
                grads[3 * at] = _summed(flow, dz, taps, edges)
                del flow
            del z
            if (
                at == 0 and needs[0] and ctx.around and grad_residual is not None
            ):  # one gradient in place of two that torch would add
                grad, grad_residual = adjoint_onto(dz, taps, *edges, grad_residual), None
            elif at or needs[0]:
                grad = adjoint(dz, taps, *edges)
        return grad if needs[0] else None, grad_residual, None, None, *grads


def _let_go(tensors: Sequence[torch.Tensor]) -> None:
    """Free the memory of tensors that are still referenced but are not read again."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.resizable():
            storage.resize_(0)


def _summed(x: torch.Tensor, grad: torch.Tensor, taps: torch.Tensor, edges: tuple[KernelMap, int, str]) -> torch.Tensor:
    """The gradient of taps, beside what follows in a run that has streams for it.

    Not of wide layers, whose sums fill the GPU, and whose partial sums would lie beside what follows.
    """

    def run() -> torch.Tensor:
        return weight_gradient(x, grad, *edges)

    streams = current()
    if streams is None or not taps.is_leaf or taps.shape[1] * taps.shape[2] > MOST_ASIDE:
        return run()
    return streams.summed(run, x, grad)


def _differentiable(
    grad: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor | None,
    stages: tuple[Stage, ...],
    tensors: Sequence[torch.Tensor | None],
    residual: bool,
) -> tuple:
    """The gradients in operations that have a derivative: torch's own, and this library's convolution."""
    flow = middle = x
    for at, stage in enumerate(stages):
        taps, weight, bias = tensors[3 * at : 3 * at + 3]
        slope, count = stage.norm.slope, stage.norm.alive
        middle = stage.convolve(flow, taps)
        if count is None:
            middle = torch.nn.functional.batch_norm(middle, None, None, weight, bias, True, 0.0, stage.norm.eps)
        else:
            middle = over_live_rows(middle, count, weight, bias, stage.norm.eps)[0]
        flow = middle if slope == 1 else torch.where(middle <= 0, middle * slope, middle)
    dz, slope, count = grad, stages[-1].norm.slope, stages[-1].norm.alive
    if count is not None:
        dz = torch.where(live_rows(grad, count), grad, 0)
    if slope != 1:
        dz = torch.where((middle if y is None else y).detach() <= 0, dz * slope, dz)
    inputs = (x, *tensors)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(middle, wanted, dz, create_graph=True) if wanted else ())
    grad_x, *grads = [next(found) if t is not None and t.requires_grad else None for t in inputs]
    return grad_x, dz if residual else None, None, None, *grads


def trained(x: torch.Tensor, layers: Sequence[Layer], residual: torch.Tensor | None = None) -> torch.Tensor:
    """Layer after layer, the residual before the last activation: (N, C) with the statistics of this batch.

    Running statistics follow as torch's do.

    Args:
        x: (N, C) that `serves`, for a first layer without a convolution; else (N_in, C_in) of its plan.
        layers: what follows one another; all but the first have convolutions.
        residual: (N, C) of x's dtype; or None.
    """
    if layers[0].plan is None:
        x = lined_up(x)
    if residual is not None:
        residual = lined_up(residual)
    stages, tensors = [], []
    for norm, slope, plan, taps, alive in layers:
        weight, bias, *running = tensors_of(norm)
        moved = tuple(running) if norm.training and running[0] is not None else None
        how = Norm(norm.eps, norm.momentum or 0.0, slope, moved, alive)  # type: ignore[arg-type]
        stages.append(Stage(how, None if plan is None else Call.of(plan)))
        tensors += [taps, weight, bias]
    source = maker_of(x, layers[0].alive is not None)
    with without(x, source):
        return _apply(x, residual, tuple(stages), source, *tensors)


#: Function.apply without its look for functional transforms, which `serves` has ruled out
_apply: Any = super(torch.autograd.Function, _Trained).apply


def serves(x: Any, norm: torch.nn.BatchNorm1d, rows: int) -> bool:
    """Whether `trained` can stand for this norm of (``rows``, C) made from the features x.

    It needs a GPU, half or single precision, and statistics of this batch whose weight is known beforehand. Tracing,
    functional transforms and tensor subclasses rule it out.
    """
    training, momentum = norm.training, norm.momentum
    weight, bias, mean, var, tracked = tensors_of(norm)
    if not (training or mean is None) or rows < 2:
        return False
    if training and mean is not None and (momentum is None or var is None or tracked is None):
        return False
    return reads(x, weight, bias, mean, var)
