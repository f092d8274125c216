"""For mkdocstrings: examples in docstrings become code, arguments that share a line get a row each, shapes of one axis
are shown as plainly as the others, names of types give way to what they stand for, and functions that a call makes have
the words that it was given."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import griffe

BLOCK = re.compile(r"(?:^Examples?::?\n\n?)?(^(?P<indent> *)>>> .*(?:\n(?! *$).+)*)", re.MULTILINE)


def fenced(text: str) -> str:
    """Every run of lines that begins with ``>>>``, up to an empty line, between fences, without doctest's words.

    >>> fenced("Adds.\\n\\n>>> 1 + 1  # doctest: +SKIP\\n2")
    'Adds.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    >>> fenced(fenced(">>> 1")) == fenced(">>> 1")
    True
    """

    def block(match: re.Match[str]) -> str:
        lines = (re.sub(r" *# doctest: .*", "", line.removeprefix(match["indent"])) for line in match[1].splitlines())
        return "\n".join(["```pycon", *lines, "```"])

    return text if "```pycon" in text else BLOCK.sub(block, text)


SHARED = re.compile(r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +\S.*)*)", re.MULTILINE)


def apart(text: str) -> str:
    """``a, b: words`` as one argument each, so that a reader sees the default of each.

    >>> apart("Args:\\n    a, b: of both.")
    'Args:\\n    a: of both.\\n    b: of both.'
    """

    def rows(match: re.Match[str]) -> str:
        return "\n".join(f"{match['indent']}{name}: {match['text']}" for name in match["names"].split(", "))

    for section in ("Args:\n", "Attributes:\n"):
        head, mark, rest = text.partition(section)
        arguments, gap, others = rest.partition("\n\n")
        text = head + mark + SHARED.sub(rows, arguments) + gap + others
    return text


def trim(given: Any) -> None:
    """Take the space off that begins a shape of one axis, `Float[torch.Tensor, " M"]`, for linters alone.

    >>> code = 'def f(x: list[Int[torch.Tensor, " M"] | None]): ...'
    >>> parameter = griffe.visit("m", code=code, filepath=None)["f"].parameters["x"]
    >>> trim(parameter.annotation)
    >>> str(parameter.annotation)
    "list[Int[torch.Tensor, 'M'] | None]"
    """
    if isinstance(given, griffe.ExprTuple):
        given.elements = [re.sub(r"""^(['"]) +""", r"\1", e) if isinstance(e, str) else e for e in given.elements]
    if isinstance(given, griffe.Expr):
        given = [getattr(given, field.name) for field in fields(given)]
    if isinstance(given, list | tuple):
        for part in given:
            trim(part)


def meaning(given: Any, modules: griffe.ModulesCollection) -> Any:
    """An annotation with the module's own names for types (`Axes`, a `TypeVar`) replaced by what they stand for.

    >>> code = "from typing import TypeVar\\nAxes = int | list[int]\\nT = TypeVar('T', int, str)\\n"
    >>> code += "def f(x: Axes | None) -> T: ..."
    >>> with griffe.temporary_visited_package("m", {"__init__.py": code}) as package:
    ...     function = package["f"]
    >>> str(meaning(function.parameters["x"].annotation, package.modules_collection))
    'int | list[int] | None'
    >>> str(meaning(function.returns, package.modules_collection))
    'int | str'
    """
    if isinstance(given, griffe.ExprName):
        try:
            value = modules[given.canonical_path].value
        except (KeyError, AttributeError, griffe.AliasResolutionError):
            return given
        if isinstance(value, griffe.ExprCall) and value.canonical_path == "typing.TypeVar":
            kinds = [k.value if isinstance(k, griffe.ExprKeyword) else k for k in value.arguments[1:]]
            return reduce(lambda left, right: griffe.ExprBinOp(left, "|", right), kinds) if kinds else given
        return meaning(value, modules) if isinstance(value, griffe.ExprBinOp | griffe.ExprSubscript) else given
    if isinstance(given, griffe.Expr):
        return replace(given, **{f.name: meaning(getattr(given, f.name), modules) for f in fields(given) if f.init})
    return [meaning(part, modules) for part in given] if isinstance(given, list | tuple) else given


def made(statement: ast.stmt) -> tuple[str, str] | None:
    """The name and the docstring of a function that a call makes: of the first name, where it makes several.

    >>> made(ast.parse("relu, relu_grad = make('relu', doc='max(x, 0)')").body[0])
    ('relu', 'max(x, 0)')
    """
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(statement.value, ast.Call):
        return None
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    first = target.elts[0] if isinstance(target, ast.Tuple) else target
    words = [k.value.value for k in statement.value.keywords if k.arg == "doc" and isinstance(k.value, ast.Constant)]
    return (first.id, inspect.cleandoc(words[0])) if words and isinstance(first, ast.Name) else None


class FencedExamples(griffe.Extension):
    """Prepares every docstring before it is parsed, and every annotation before it is shown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(apart(obj.docstring.value))
        if isinstance(obj, griffe.Function):
            trim([obj.returns, *(parameter.annotation for parameter in obj.parameters)])
        if isinstance(obj, griffe.Attribute):
            trim(obj.annotation)

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        modules = [pkg]
        for scope in modules:
            for member in scope.members.values():
                if member.is_alias:
                    continue
                if member.is_module or member.is_class:
                    modules.append(member)
                elif member.is_function:
                    for function in (member, *(member.overloads or ())):
                        function.returns = meaning(function.returns, loader.modules_collection)
                        for parameter in function.parameters:
                            parameter.annotation = meaning(parameter.annotation, loader.modules_collection)
                elif member.is_attribute:
                    member.annotation = meaning(member.annotation, loader.modules_collection)

    def on_module_members(self, *, node: ast.AST | griffe.ObjectNode, mod: griffe.Module, **_: Any) -> None:
        for name, words in filter(None, map(made, getattr(node, "body", ()))):
            kind = griffe.ExprName("PointwiseDynamicFunction", parent=mod)
            function = griffe.Attribute(name, annotation=kind, docstring=griffe.Docstring(fenced(words)))
            mod.set_member(name, function)
