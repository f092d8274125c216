"""Calls that `torch.fx` records as one node each, where a graph is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Proxy, ProxyableClassMeta

from sparseconv.transforms import tracing


class Traced(ProxyableClassMeta):
    """Of a class whose objects are proxies where they are made of proxies."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if tracing():  # Dynamo does not follow type.__call__
            made: Any = object.__new__(cls)  # type: ignore[arg-type]
            made.__init__(*args, **kwargs)
            return made
        proxy = proxy_among([*args, *kwargs.values()])
        if proxy is None:
            return type.__call__(cls, *args, **kwargs)
        return proxy.tracer.create_proxy("call_function", cls, args, kwargs)


def proxy_among(values: Any) -> Proxy | None:
    """The first proxy of ``values``, also within lists and tuples; None where nothing is traced."""
    if isinstance(values, Proxy):
        return values
    if isinstance(values, (list, tuple)):
        for value in values:
            if isinstance(value, (Proxy, list, tuple)) and (found := proxy_among(value)) is not None:
                return found
    return None


def leaf(module: torch.nn.Module, *args: Any, takes: str = "a SparseConvTensor") -> Any:
    """The call of ``module`` as a node, as of torch's own modules; for arguments that are no sparse tensors.

    Raises:
        TypeError: nothing among ``args`` is traced, so that they are of a wrong kind.
        ValueError: ``module`` is the root of the graph, which has no name to call it by.
    """
    proxy = proxy_among(args)
    name = type(module).__name__
    if proxy is None:
        raise TypeError(f"{name} takes {takes}; got {type(args[0]).__name__}")
    tracer: Any = proxy.tracer
    path = tracer.path_of_module(module)
    if not path:
        raise ValueError(f"{name} is one node of a graph, not a graph: trace SparseSequential({name})")
    return tracer.create_proxy("call_module", path, args, {})


def recorded(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The call of a function of this package as a node; None where nothing among ``args`` is traced."""
    proxy = proxy_among(args)
    return None if proxy is None else proxy.tracer.create_proxy("call_function", function, tuple(args), {})
