"""`torch.autograd.Function` with the types that its methods have: as many arguments as `apply` was given.

torch annotates ``backward(ctx, *grad_outputs)`` and its siblings for every subclass at once. A subclass names its own
arguments, one gradient an output, so a type checker takes each method for a mistake. Here every method is a callable of
any arguments, which is how torch calls them. At run time this is torch's class.

>>> Function is torch.autograd.Function
True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:

    class Function:
        """A node of the graph: `forward`, and what autograd asks of it."""

        generate_vmap_rule: ClassVar[bool]
        forward: ClassVar[Callable[..., Any]]
        setup_context: ClassVar[Callable[..., Any]]
        backward: ClassVar[Callable[..., Any]]
        jvp: ClassVar[Callable[..., Any]]
        vmap: ClassVar[Callable[..., Any]]

        @classmethod
        def apply(cls, *args: Any) -> Any:
            """Run `forward`, and put the node into the graph."""

else:
    Function = torch.autograd.Function
