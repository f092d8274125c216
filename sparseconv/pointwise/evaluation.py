"""A pointwise function of plain tensors: which kernel or twin gives its outputs. No autograd, no dispatch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.gpu.cuda_capability import has_triton
from sparseconv.pointwise import metadata
from sparseconv.pointwise.kernel.launch import Launch, Overload, task_space
from sparseconv.pointwise.kernel.plan import Plan
from sparseconv.pointwise.metadata import Metadata
from sparseconv.pointwise.scalar import ScalarFunction
from sparseconv.pointwise.schema import Config, Derivative, Schema
from sparseconv.pointwise.strided import StridedBuffer
from sparseconv.torch_private import is_batch_of_cotangents
from sparseconv.transforms import check_not_recorded

if TYPE_CHECKING:
    from jaxtyping import Shaped

_PLANS_KEPT = 4096  # geometries remembered by a function


def packed(outputs: Sequence[Any]) -> Any:
    """Outputs as a call returns them: one as it is, several as a tuple."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


class Evaluation:
    """The outputs of a scalar function over tensors, by its kernel on a GPU and by its twin on a CPU.

    The attributes are those of `PointwiseDynamicFunction`.
    """

    def __init__(
        self,
        scalar: ScalarFunction,
        schema: Schema,
        *,
        reference: Callable[..., Any] | None = None,
        derivative: Mapping[int, Derivative] | None = None,
        config: Config | None = None,
        autocast: torch.dtype | None = None,
        defaults: Sequence[Any] = (),
        doc: str | None = None,
    ) -> None:
        self.schema = schema
        self.defaults = tuple(defaults)
        self.reference = reference
        self.derivative = derivative
        self.config = config or Config()
        self.autocast = autocast
        self.extra_arguments = schema.scalars
        self.differentiable = derivative is not None or reference is not None
        self.__name__ = self.__qualname__ = schema.name
        self.__doc__ = doc or getattr(scalar.python, "__doc__", None) or type(self).__doc__
        self._scalar_function = scalar
        self._is_tensor = schema.is_tensor
        self._count = schema.num_inputs
        self._overloads: dict[int, Overload] = {}
        self._lock = threading.Lock()
        self._derived: dict[Any, Any] = {}
        self.recipes: dict[tuple[bool, ...], Any] = {}  # what gradients of some arguments need: see `derivative.keep`
        self._plans: dict[Any, Plan] = {}

    @property
    def scalar(self) -> Any:
        return self._scalar_function.jitted

    @property
    def scalar_function(self) -> ScalarFunction:
        return self._scalar_function

    def instantiate(self, rank: int) -> Overload:
        """The overload for task spaces of ``rank`` axes, which takes ready outputs and infers nothing."""
        if not isinstance(rank, int) or rank < 0:
            raise ValueError(f"{self.schema.name}: instantiate(rank) takes a rank of 0 or more, but got {rank!r}")
        found = self._overloads.get(rank)
        if found is None:
            with self._lock:
                found = self._overloads.setdefault(
                    rank, Overload(self.schema, self._scalar_function, rank, self.config)
                )
        return found

    def derived(self, make: Callable[..., Any], *key: Any) -> Any:
        """What ``make(self, *key)`` gives, made once for each key."""
        found = self._derived.get((make, key))
        if found is None:
            found = self._derived.setdefault((make, key), make(self, *key))
        return found

    def evaluate(self, args: Sequence[Any]) -> list[Shaped[torch.Tensor, " ..."]]:
        """The outputs for plain arguments on one device, outside autograd."""
        first = args[self.schema.tensors[0]]
        device = metadata.check_devices(self.schema, args) if first.device.type == "cpu" else first.device
        if not has_triton(device):
            if self.reference is not None:
                return _unshared(self.twin(args), args)
            return self._kernel(args, {}, device)
        check_not_recorded()
        args = self._placed(args, device)
        if any(isinstance(args[i], StridedBuffer) for i in self.schema.tensors) or self._scalar_function.interpreted:
            return self._kernel(args, {}, device)
        expected, outputs = self._outputs(args, {}, device)
        launch = self._launch(args, expected, outputs)
        self._remember(args, {}, Plan.make(self.schema, args, expected, outputs, launch, given=False))
        if launch is not None:
            launch.on(args, outputs, self.schema)
        return outputs

    def _remember(self, args: Sequence[Any], outs: Mapping[str, Any], plan: Plan) -> None:
        """Keep what a further call of this geometry needs."""
        key: list[Any] = [torch.get_default_dtype()]
        for value, flag in zip(args, self._is_tensor):
            if flag:
                key += (value.shape, value.stride(), value.dtype, value.get_device(), value.data_ptr() & 15)
            else:
                key.append(type(value))
        if outs and not self._written(key, outs):
            return
        if len(self._plans) >= _PLANS_KEPT:
            self._plans.clear()
        self._plans[tuple(key)] = plan

    def twin(self, args: Sequence[Any]) -> list[Shaped[torch.Tensor, " ..."]]:
        """The outputs by ``reference``, with the dtypes, shape and strides that the kernel would give."""
        schema = self.schema
        if self.reference is None:
            raise TypeError(f"{schema.name} has no reference= and cannot run on {args[schema.tensors[0]].device}")
        args = [a.to_tensor() if isinstance(a, StridedBuffer) else a for a in args]
        expected = metadata.infer(schema, args)
        seen = [a.to(t) if flag else a for a, flag, t in zip(args, schema.is_tensor, expected.dtypes.compute)]
        if schema.index:
            count = torch.Size(expected.shape).numel()
            seen.append(torch.arange(count, device=seen[schema.tensors[0]].device).view(expected.shape))
        try:
            results = self.reference(*seen)
        except (NotImplementedError, RuntimeError) as error:
            if all(dtype.is_floating_point for dtype in expected.dtypes.compute):
                raise
            raise TypeError(f"{schema.name} is not made for {metadata.describe(args)}: torch says: {error}") from error
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        if len(results) != schema.num_outputs:
            raise ValueError(
                f"{schema.name}: reference= gave {len(results)} outputs, but {schema.num_outputs} are declared"
            )
        return [_as_expected(result, dtype, expected) for result, dtype in zip(results, expected.dtypes.results)]

    def _kernel(self, args: Sequence[Any], outs: Mapping[int, Any], device: torch.device) -> list[Any]:
        if not has_triton(device) and not (device.type == "cpu" and self._scalar_function.interpreted):
            raise TypeError(
                f"{self.schema.name} has no reference=, the torch function that runs on {device.type.upper()} tensors; "
                f"declare one, or move the arguments to a GPU that Triton serves"
            )
        expected, outputs = self._outputs(args, outs, device)
        launch = self._launch(args, expected, outputs)
        if launch is not None:
            launch.on(args, outputs, self.schema)
        return outputs

    def _outputs(
        self, args: Sequence[Any], outs: Mapping[int, Any], device: torch.device
    ) -> tuple[Metadata, list[Any]]:
        expected = metadata.infer(self.schema, args)
        for j, out in outs.items():
            name = f"out{j}"
            metadata.check_output(self.schema.name, name, out, expected.shape, expected.dtypes.results[j], device)
            metadata.check_aliasing(self.schema, name, out, args)
            for k, other in outs.items():
                if k != j and not metadata.separate(other, out):
                    shared = f"{name}= and out{k}= share memory, given for two outputs"
                    raise ValueError(f"{self.schema.name}: {shared}; pass a clone of one of them")
        fresh = expected.allocate(device) if len(outs) < self.schema.num_outputs else []
        return expected, [outs[j] if j in outs else fresh[j] for j in range(self.schema.num_outputs)]

    def _launch(self, args: Sequence[Any], expected: Metadata, outputs: Sequence[Any]) -> Launch | None:
        if 0 in expected.shape:
            return None
        geometry = [*(tuple(o.stride()) for o in outputs), *expected.operands]
        space = task_space(self.schema, args, outputs, expected.shape, geometry, self.config)
        return self.instantiate(len(space.sizes)).prepare(args, outputs, space, expected.dtypes)

    def _placed(self, args: Sequence[Any], device: torch.device) -> Sequence[Any]:
        """0-d CPU tensors moved to the device of the others, and values in memory that torch would negate when read."""
        if any(isinstance(a, torch.Tensor) and a.is_neg() for a in args):
            args = [a.resolve_neg() if isinstance(a, torch.Tensor) else a for a in args]
        if device.type == "cpu" or all(a.device == device for a in (args[i] for i in self.schema.tensors)):
            return args
        return [a.to(device) if isinstance(a, torch.Tensor) and a.device.type == "cpu" else a for a in args]

    def _written(self, key: list[Any], outs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Given outputs added to the key of a call, or nothing where the call must be looked at in full."""
        given = []
        for name, value in outs.items():
            if type(value) is not torch.Tensor or value.requires_grad or value.is_neg():
                return []
            key += (name, value.shape, value.stride(), value.dtype, value.get_device(), value.data_ptr() & 15)
            given.append(value)
        return given if len(given) == self.schema.num_outputs else []


def _as_expected(result: Any, dtype: torch.dtype, expected: Metadata) -> torch.Tensor:
    """A twin's result as a tensor of the dtype and strides that the kernel's would have."""
    result = result.to(dtype)
    wrong_strides = any(n > 1 and a != b for n, a, b in zip(expected.shape, result.stride(), expected.strides))
    same_shape = tuple(result.shape) == expected.shape
    if same_shape and not wrong_strides:
        return result
    fresh = torch.empty_strided(expected.shape, expected.strides, dtype=dtype, device=result.device)
    return fresh.copy_(result)


def _unshared(results: Sequence[torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
    """A twin's results, copied where their memory is that of an argument or of another result."""
    if any(map(is_batch_of_cotangents, results)):  # which have no memory of their own
        return list(results)
    arrays = [a.base if isinstance(a, StridedBuffer) else a for a in args]
    taken = {a.untyped_storage().data_ptr() for a in arrays if isinstance(a, torch.Tensor)}
    outputs = []
    for result in results:
        memory = result.untyped_storage().data_ptr()
        outputs.append(torch.empty_like(result).copy_(result) if memory in taken else result)
        taken.add(memory)
    return outputs
