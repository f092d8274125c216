"""Triton's interpreter without work whose outcome nobody sees; the kernels of the tests run in it half as long.

It does to a kernel what it did. Where Triton has other names inside, it stays as it is.
"""

from __future__ import annotations

import dataclasses
import inspect


def hasten() -> None:
    """Savings, each by itself, in the interpreter of this process."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    for saving in (no_sums_for_nobody, known_dtypes, language_patched_once, block_types_kept):
        try:
            saving(interpreter)
        except (AttributeError, TypeError):
            continue


def no_sums_for_nobody(interpreter) -> None:
    """Every sum of integers is made again with 64 bits for an assertion, which only holds with ``debug``, and it is
    never that: without ``debug`` the assertion returns before it looks."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def known_dtypes(interpreter) -> None:
    """The table of dtypes, made anew for each value, is asked once for each name."""
    original, known = interpreter._get_np_dtype, {}

    def get(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = original(dtype)
        return known[name]

    interpreter._get_np_dtype = get


def language_patched_once(interpreter) -> None:
    """A function that a kernel calls finds the language patched by the kernel, and does not search it again; what it
    patches itself, in the modules that the kernel does not see, it leaves so."""
    original, scope_of, kernel, left = interpreter._patch_lang, interpreter._LangPatchScope, [], set()
    names = {interpreter.tl.__name__, interpreter.tl.core.__name__}

    def patch(fn):
        found = {value.__name__ for value in fn.__globals__.values() if inspect.ismodule(value)} & names
        if kernel and found and found <= kernel[0] | left:
            return scope_of()
        scope = original(fn)
        if kernel:
            left.update(found)
            return scope
        kernel.append(found)
        restore = scope.restore

        def ended() -> None:
            kernel.clear()
            restore()

        scope.restore = ended
        return scope

    interpreter._patch_lang = patch


def block_types_kept(interpreter) -> None:
    """The type of a block of numbers, made anew with all its checks for each value, is made once."""
    builder, block = interpreter.interpreter_builder, interpreter.tl.block_type
    of_builder, of_block, made = builder.get_block_ty, block.with_element_ty, {}

    def get_block_ty(dtype, shape):
        if dtype.is_ptr():
            return of_builder(dtype, shape)
        key = dtype, tuple(shape)
        if key not in made:
            made[key] = of_builder(dtype, shape)
        return made[key]

    def with_element_ty(self, scalar):
        if scalar is self.element_ty:
            return self
        return of_block(self, scalar) if scalar.is_ptr() else get_block_ty(scalar, self.shape)

    builder.get_block_ty, block.with_element_ty = get_block_ty, with_element_ty
