"""Who sees tensors change between a call and its result: transforms of torch.func, and forward-mode derivatives.

Both need every call as a node that they know how to change. A kernel launched past them would lose what they follow,
and its result would look like a constant.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

#: whether there are transforms of torch.func
functional: Callable[[], bool] = torch._C._are_functorch_transforms_active


def forward_mode() -> bool:
    """Whether there is a level of dual tensors, of torch.autograd.forward_ad or of torch.func.jvp.

    Raises RuntimeError where forward mode is asked for forward mode's derivative: of autograd functions torch loses a
    part of that, without a word.
    """
    if forward_ad._current_level < 0:
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    if sum(level.key() == torch._C._functorch.TransformType.Jvp for level in levels) > 1:
        raise RuntimeError(
            "the derivative of torch.func.jvp (or jacfwd) by another one is not offered, since torch loses a part of "
            "it: take torch.func.grad, vjp or jacrev for one of the two, as torch.func.hessian does"
        )
    return True


def present() -> bool:
    """Whether there are either; not to be asked where torch.compile may trace, which knows no rules for them."""
    return forward_mode() or functional()


def active() -> bool:
    """`present`, and nobody traces."""
    return not torch.compiler.is_compiling() and present()
