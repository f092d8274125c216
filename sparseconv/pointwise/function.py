"""The operator that `pointwise_dynamic` makes of a scalar function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sparseconv import transforms
from sparseconv.gpu.cuda_capability import has_triton
from sparseconv.pointwise import metadata
from sparseconv.pointwise.derivative import Differentiable, Transformed
from sparseconv.pointwise.evaluation import Evaluation, packed
from sparseconv.pointwise.kernel.plan import Plan
from sparseconv.pointwise.library import register
from sparseconv.pointwise.scalar import ScalarFunction
from sparseconv.pointwise.schema import Schema
from sparseconv.pointwise.strided import StridedBuffer
from sparseconv.torch_private import dispatch_modes

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter


class PointwiseDynamicFunction(Evaluation):
    """A pointwise operator over tensors of any rank, strides, dtype and broadcast, made by `pointwise_dynamic`.

    Call it with the arguments of its scalar function by position, and outputs to write to by keyword (``out0=``,
    ``out1=``, or ``out=`` where there is one). CPU tensors go through the twin given as ``reference``, GPU tensors
    through a generated kernel.

    Attributes:
        schema: the signature.
        scalar: the jitted scalar function, to be called from other kernels: ``scalar(tile, *numbers)``.
        extra_arguments: positions of the arguments that are numbers.
        reference: the twin, a torch function of the same arguments, or None.
        derivative: argument -> `Derivative`, or None if gradients go through the twin.
        op: the operator that torch has registered.

    >>> from sparseconv.pointwise import leaky_relu
    >>> leaky_relu(torch.tensor([-1.0, 2.0]), 0.5), leaky_relu.extra_arguments
    (tensor([-0.5000,  2.0000]), (1,))
    """

    def __init__(self, scalar: ScalarFunction, schema: Schema, **options: Any) -> None:
        super().__init__(scalar, schema, **options)
        self.op, self._library = register(self)

    def __call__(self, *args: Any, **outs: Any) -> Any:
        missing = self._count - len(args)
        if 0 < missing <= len(self.defaults):
            args = (*args, *self.defaults[len(self.defaults) - missing :])
        if torch.compiler.is_compiling():
            return self._traced(args, outs)
        if self.autocast is not None or transforms.present():
            return self._general(args, outs)
        key: list[Any] = [torch.get_default_dtype()]
        addresses: list[int] = []
        numbers: list[Any] = []
        grad = False
        try:
            for value in args:
                kind = type(value)
                if kind is _Tensor or kind is _Parameter:
                    if value.is_neg():
                        return self._general(args, outs)
                    address = value.data_ptr()
                    addresses.append(address)
                    key += (value.shape, value.stride(), value.dtype, value.get_device(), address & 15)
                    grad = grad or value.requires_grad
                else:
                    key.append(kind)
                    numbers.append(value)
            written = outs and self._written(key, outs)
        except RuntimeError:  # a tensor without an address: one that a transformation wraps
            return self._general(args, outs)
        plan = self._plans.get(tuple(key))
        if plan is None or dispatch_modes():
            return self._general(args, outs)
        if grad and torch.is_grad_enabled():
            if outs or not self.differentiable:
                return self._general(args, outs)
            return Differentiable.apply(self, plan, addresses, numbers, *args)
        if not outs:
            return plan.fresh(addresses, numbers)
        if not written or not plan.separate(addresses, written):
            return self._general(args, outs)
        return plan.into(addresses, numbers, written)

    def _general(self, args: Sequence[Any], outs: Mapping[str, Any]) -> Any:
        """A call in full: every check, every kind of argument."""
        metadata.check_arguments(self.schema, args)
        device = metadata.check_devices(self.schema, args)
        args = self._placed(self._cast(args, device), device)
        if outs:
            return self._into(args, outs, device)
        tensors = [args[i] for i in self.schema.tensors]
        if any(isinstance(a, StridedBuffer) for a in tensors):
            return packed(self._kernel(args, {}, device) if has_triton(device) else self.evaluate(args))
        if transforms.present():
            return Transformed.apply(self, *args)
        if _transformed(tensors) or device.type == "meta":
            return self.op(*args)
        if torch.is_grad_enabled() and any(a.requires_grad for a in tensors) and self._has_gradient(args):
            return Differentiable.apply(self, None, (), (), *args)
        return packed(self.evaluate(args))

    def kernel_path(self, *args: Any, **outs: Any) -> Any:
        """The call by the generated kernel, whatever the device; on CPU tensors Triton's interpreter must be on."""
        args = (*args, *self.defaults[len(self.defaults) - (self.schema.num_inputs - len(args)) :])
        metadata.check_arguments(self.schema, args)
        device = metadata.check_devices(self.schema, args)
        return packed(self._kernel(self._placed(args, device), self._named(outs), device))

    def _into(self, args: Sequence[Any], outs: Mapping[str, Any], device: torch.device) -> Any:
        named = self._named(outs)
        tensors = [a for a in [*(args[i] for i in self.schema.tensors), *named.values()] if isinstance(a, torch.Tensor)]
        if named and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise ValueError(
                f"{self.schema.name}: outputs given by keyword are not differentiable, but an argument requires a "
                f"gradient; leave the output out, or wrap the call in torch.no_grad()"
            )
        if not named:
            return self(*args)
        expected, outputs = self._outputs(args, named, device)
        if self.reference is not None and not has_triton(device):
            with torch.no_grad():
                return packed([out.copy_(result) for out, result in zip(outputs, self.twin(args))])
        if not has_triton(device) or len(tensors) < len(self.schema.tensors) + len(named):
            outputs = self._kernel(args, named, device)
        else:
            launch = self._launch(args, expected, outputs)
            if launch is not None:
                launch.on(args, outputs, self.schema)
                if launch.device >= 0:
                    plan = Plan.make(self.schema, args, expected, outputs, launch, given=True)
                    self._remember(args, outs, plan)
        for out in named.values():
            torch.autograd.graph.increment_version(out.base if isinstance(out, StridedBuffer) else out)
        return packed(outputs)

    def _traced(self, args: Sequence[Any], outs: Mapping[str, Any]) -> Any:
        """The call while torch.compile traces it: the operator, and copies into given outputs."""
        if self.autocast is not None:
            args = self._cast(args, args[self.schema.tensors[0]].device)
        result = self.op(*args)
        if not outs:
            return result
        results = list(result) if isinstance(result, tuple) else [result]
        for j, out in self._named(outs).items():
            made = results[j]
            metadata.check_output(self.schema.name, f"out{j}", out, made.shape, made.dtype, made.device)
            results[j] = out.copy_(made)
        return packed(results)

    def _named(self, outs: Mapping[str, Any]) -> dict[int, Any]:
        """Given outputs by number; None stands for an output that is not given."""
        count = self.schema.num_outputs
        known = {f"out{j}": j for j in range(count)}
        if count == 1:
            known["out"] = 0
        named: dict[int, Any] = {}
        for name, value in outs.items():
            if name == "out" and count > 1:
                raise TypeError(f"{self.schema.name} has {count} outputs: say out0=, out1=, ..., not out=")
            if name not in known:
                raise TypeError(f"{self.schema.name} got an unknown keyword {name!r}; it knows {', '.join(known)}")
            if value is not None:
                if known[name] in named:
                    raise TypeError(f"{self.schema.name}: out= and out0= are the same output")
                named[known[name]] = value
        return named

    def _cast(self, args: Sequence[Any], device: torch.device) -> Sequence[Any]:
        """Under autocast, half precision arguments in the dtype in which this function is to run."""
        if self.autocast is None or not torch.is_autocast_enabled(device.type):
            return args
        halves = (torch.float16, torch.bfloat16)
        return [a.to(self.autocast) if isinstance(a, torch.Tensor) and a.dtype in halves else a for a in args]

    def _has_gradient(self, args: Sequence[Any]) -> bool:
        results = metadata.dtypes_of(self.schema, args).results
        if not any(t.is_floating_point or t.is_complex for t in results):
            return False
        if not self.differentiable:
            raise ValueError(
                f"{self.schema.name} has neither derivative= nor reference=, so it cannot be differentiated, but an "
                f"argument requires a gradient; declare one, or call it under torch.no_grad() or on x.detach()"
            )
        return True

    def __reduce__(self) -> str:
        """Copied and pickled as functions are: by the name that they have in the module that made them."""
        return self.__name__

    def __repr__(self) -> str:
        schema = self.schema
        parts = [f"{len(schema.tensors)} tensors", f"{len(schema.scalars)} numbers", f"{schema.num_outputs} outputs"]
        has = [name for name in ("reference", "derivative") if getattr(self, name) is not None]
        return f"PointwiseDynamicFunction({schema.name}: {', '.join(parts + has)})"


def _transformed(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a subclass or a dispatch mode must see the call as an operator."""
    return dispatch_modes() > 0 or any(type(t) is not _Tensor and type(t) is not _Parameter for t in tensors)
