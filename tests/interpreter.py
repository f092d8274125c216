"""Triton's interpreter without work whose outcome nobody sees; the kernels of the tests run in it a quarter as long.

It does to a kernel what it did. Where Triton has other names inside, it stays as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect


def hasten() -> None:
    """Savings, each by itself, in the interpreter of this process."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    for saving in (
        *(no_sums_for_nobody, known_dtypes, language_patched_once, block_types_kept),
        *(shapes_kept, types_promoted_once, operands_alike, whole_numbers_kept, called_directly),
    ):
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

    @functools.cache
    def seen_by(fn):
        return {value.__name__ for value in fn.__globals__.values() if inspect.ismodule(value)} & names

    def patch(fn):
        found = seen_by(fn)
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
    """The type of a block of numbers or pointers, made anew for each value, is checked once: equal ones share what
    they hold."""
    block = interpreter.tl.block_type
    original, with_element_ty, held = block.__init__, block.with_element_ty, {}

    def init(self, element_ty, shape):
        name = getattr(element_ty, "name", None)
        key = name, getattr(element_ty, "address_space", None), tuple(shape)
        if name is not None and key in held:
            self.__dict__ = held[key]
            return
        original(self, element_ty, shape)
        held[key] = self.__dict__

    block.__init__ = init
    block.with_element_ty = lambda self, scalar: self if scalar is self.element_ty else with_element_ty(self, scalar)


def shapes_kept(interpreter) -> None:
    """A value's shape and its number of elements follow from its type, and are worked out once for each type."""
    tensor = interpreter.tl.tensor
    original, own = tensor.__init__, {"handle", "type"}

    def init(self, handle, type):
        kept = type.__dict__.get("_of_values")
        if kept is None:
            original(self, handle, type)
            type._of_values = {name: value for name, value in self.__dict__.items() if name not in own}
            return
        self.__dict__.update(kept)
        self.handle, self.type = handle, type

    tensor.__init__ = init


def types_promoted_once(interpreter) -> None:
    """The type in which two others are computed is found once for each pair."""
    semantic, found = interpreter.interpreter_semantic, {}
    original = semantic.computation_type_impl

    def promote(a, a_is_scalar, b, b_is_scalar, div_or_mod):
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in found:
            found[key] = original(a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return found[key]

    semantic.computation_type_impl = promote


def operands_alike(interpreter) -> None:
    """Values of one type need no cast and no broadcast, and are not asked for either."""
    semantic, tensor = interpreter.interpreter_semantic, interpreter.tl.tensor
    check, broadcast, cast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value, semantic.cast
    block, make, create = interpreter.tl.block_type, semantic.make_tensor, semantic.builder.create_broadcast
    computed_in_themselves = {"int1", "int32", "int64", "uint32", "uint64", "fp32", "fp64"}

    def operands(lhs, rhs, *flags, **more):
        alike = isinstance(lhs, tensor) and isinstance(rhs, tensor) and lhs.type.__dict__ is rhs.type.__dict__
        if alike and lhs.dtype.name in computed_in_themselves:
            return lhs, rhs
        return check(lhs, rhs, *flags, **more)

    def of_one_shape(lhs, rhs):
        a, b = lhs.type, rhs.type
        if not a.is_block() or not b.is_block():
            return broadcast(lhs, rhs)
        shapes = tuple(a.shape), tuple(b.shape)
        if shapes[0] == shapes[1]:
            return lhs, rhs
        if len(shapes[0]) != len(shapes[1]) or any(m != n and 1 not in (m, n) for m, n in zip(*shapes)):
            return broadcast(lhs, rhs)
        whole = [max(sizes) for sizes in zip(*shapes)]
        return tuple(
            value if list(shape) == whole else make(create(value.handle, whole), block(value.dtype, whole))
            for value, shape in zip((lhs, rhs), shapes)
        )

    def to_dtype(input, dtype, *more, **named):
        return input if input.dtype is dtype else cast(input, dtype, *more, **named)

    semantic.binary_op_type_checking_impl = operands
    semantic.broadcast_impl_value = of_one_shape
    semantic.cast = to_dtype


def whole_numbers_kept(interpreter) -> None:
    """A whole number beside a block of whole numbers is made a block once for each type, if it is a small one."""
    semantic, tensor = interpreter.interpreter_semantic, interpreter.tl.tensor
    check, ordinary, made = semantic.binary_op_type_checking_impl, {"int32", "int64"}, {}

    def operands(lhs, rhs, *flags, **more):
        small = type(rhs) is int and -1024 < rhs < 1024
        if not small or not isinstance(lhs, tensor) or lhs.dtype.name not in ordinary:
            return check(lhs, rhs, *flags, **more)
        key = lhs.dtype.name, tuple(getattr(lhs.type, "shape", ())), rhs  # a type that held them would hold itself
        if key not in made:
            made[key] = check(lhs, rhs, *flags, **more)[1]
        return lhs, made[key]

    semantic.binary_op_type_checking_impl = operands


def called_directly(interpreter) -> None:
    """A function of the language is called with the interpreter's semantics, not asked for them first."""
    semantic = interpreter.interpreter_semantic
    if list(inspect.signature(interpreter._patch_attr).parameters) != ["obj", "name", "member", "builder", "scope"]:
        return

    def patch_attr(obj, name, member, builder, scope):
        function = getattr(member, "__wrapped__", member)

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr
