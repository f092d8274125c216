"""What each operation of a traced network means over arrays that hold more rows than the scene has voxels.

A program runs over arrays of fixed capacity: the first rows are the scene's, the others, dead rows, hold anything, NaN
included. So every operation has to be known. One that makes each row of one row passes. One that looks along the rows,
such as a sum or a norm, is written anew with the number of live rows. Any other ends the region that is captured, and
runs on the scene's own rows. Nothing is concluded from values or lengths: whose rows a tensor has is said by the symbol
of its axis, which torch gives to each number of rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from sparseconv.torch_private import operator_kind

aten: Any = torch.ops.aten
own: Any = torch.ops.sparseconv

#: a row axis: its position, and the symbol of its length
Axis = tuple[int, str]


class Unknown(Exception):
    """Why an operation is not captured."""


#: operators of each element by itself that torch does not mark as pointwise
ELEMENTWISE = {
    aten.leaky_relu.default,  # no tag says so in torch 2.11
    aten.leaky_relu_backward.default,
    aten.elu_backward.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.hardsigmoid_backward.default,
    aten.softplus_backward.default,
    aten.mish_backward.default,
    aten.softshrink_backward.default,
    aten.hardshrink_backward.default,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
}
#: operators that make a row of one row where their axis is not that of the rows
ALONG_AN_AXIS = {
    aten._softmax.default,
    aten._log_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.cumsum.default,
    aten.sort.default,
    aten.topk.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.max.dim,
    aten.min.dim,
    aten.flip.default,
    aten.glu.default,
    aten.glu_backward.default,
    aten.gather.default,
}
#: reductions, and what stands in dead rows where they go along the rows
FILLED = {
    aten.sum.dim_IntList: 0.0,
    aten.sum.default: 0.0,
    aten.amax.default: -math.inf,
    aten.amin.default: math.inf,
    aten.max.default: -math.inf,
    aten.min.default: math.inf,
}
MEANS = {aten.mean.dim, aten.mean.default}
SOFTMAX = {aten._softmax.default: aten._softmax_backward_data.default}
VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
COPIES = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.lift_fresh_copy.default,
}
MOVES = {aten.t.default, aten.permute.default, aten.transpose.int}
MADE = {aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format, aten.new_zeros.default,
        aten.new_ones.default, aten.new_full.default, aten.new_empty.default}  # fmt: skip
BATCH_NORMS = {aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats}
#: names of the arguments that say a shape
SHAPES = {"size", "shape", "input_sizes"}
SYMBOLIC = {aten._assert_scalar.default, aten.sym_constrain_range_for_size.default, aten.sym_size.int}
#: how numbers are worked out on the device: functions of `operator` and of torch
NUMBERS = {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow}
NUMBERS |= {torch.sym_float, torch.sym_max, torch.sym_min}
for _name in ("sqrt", "log2", "exp", "cos", "sin", "tan"):
    if (_found := getattr(torch, f"_sym_{_name}", None)) is not None:
        NUMBERS.add(_found)


def value(node: Any) -> Any:
    """What torch knows of a node's result."""
    return node.meta.get("val") if isinstance(node, Node) else node


def symbols(number: Any) -> set[str]:
    """The symbols that a number is made of."""
    expr = getattr(getattr(number, "node", None), "expr", None)
    return set() if expr is None else {str(s) for s in expr.free_symbols}


def symbol(number: Any) -> str | None:
    """The symbol that a number is; None for one that is known, or made of several."""
    expr = getattr(getattr(number, "node", None), "expr", None)
    return str(expr) if expr is not None and expr.is_symbol else None


def is_number(node: Any) -> bool:
    return isinstance(value(node), (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_own(node: Any, name: str = "") -> bool:
    """Whether a node is an operator of this library, of that name where one is given."""
    target = node.target if isinstance(node, Node) else None
    return (
        target is not None
        and node.op == "call_function"
        and isinstance(target, operator_kind)
        and target.namespace == "sparseconv"
        and (not name or target._opname == name)
    )


def source_line(node: Any) -> str:
    """The line of the user's source that a node comes from."""
    lines = [line.strip() for line in (node.stack_trace or "").strip().splitlines()]
    return " | ".join(lines[-2:]) if lines else "no line is known"


class Rows:
    """The rows of the grids of a graph, and the graph with operations along them written anew.

    Attributes:
        symbols: of every number of rows of a grid.
        least: by symbol, the rows that an operation needs: two for a norm over a batch, one for a maximum.
        keys: of sizes that a recording is made for: batch items, and the shapes of dense arrays.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph: Graph = graph_module.graph
        self.symbols: set[str] = set()
        self.keys: set[str] = set()
        self.least: dict[str, int] = {}
        for node in self.graph.nodes:
            self._find(node)
            # torch works out what floats are made of as tensors, sizes among them in its default dtype
            if node.target is aten.scalar_tensor.default and is_number(node.args[0]) and not node.kwargs:
                node.kwargs = {"dtype": torch.float64}
                node.meta["val"] = value(node).double()
        self.keys -= self.symbols
        #: by symbol: a node whose first axis has it, the number of live rows, and which rows are live
        self._sources: dict[str, Node] = {}
        self._counts: dict[str, Node] = {}
        self._live: dict[str, Node] = {}
        self._numbers: dict[Node, Node] = {}
        for node in list(self.graph.nodes):
            v = value(node)
            s = symbol(v.shape[0]) if isinstance(v, torch.Tensor) and v.ndim else None
            # not a gradient of a result, of which there is none before the results
            if s in self.symbols and s is not None and not (node.op == "placeholder" and "tangents" in node.name):
                self._sources.setdefault(s, node)
            if node.op == "call_function":
                try:
                    self._check(node)
                except Unknown as reason:
                    node.meta["unknown"] = str(reason)
        self.graph.lint()
        graph_module.recompile()

    def _find(self, node: Any) -> None:
        """Symbols that a node of this library says the meaning of."""
        if is_own(node, "grid"):
            self.symbols |= symbols(value(node.args[0]).shape[0])
            self.keys |= symbols(value(node.args[1]))
        elif is_own(node, "target") or is_own(node, "subset"):
            self.symbols |= symbols(value(node)[1].shape[0])
        elif is_own(node, "convolve"):
            self.symbols |= symbols(value(node.args[1]).shape[0]) | symbols(value(node.args[4]))
        elif is_own(node, "to_dense") or is_own(node, "pool_items"):
            for number in (*value(node).shape,):
                self.keys |= symbols(number)

    # ---- axes

    def axis(self, tensor: Any) -> Axis | None:
        """The row axis of a tensor, None where it has none, and of a result that nobody reads."""
        if tensor is None:
            return None
        found = None
        for a, size in enumerate(tensor.shape):
            names = symbols(size)
            if names & self.symbols:
                name = symbol(size)
                if name is None or found is not None:
                    raise Unknown(f"rows are mixed into the shape {tuple(tensor.shape)}")
                found = a, name
            elif names - self.keys:
                raise Unknown(f"a size that changes from call to call, in the shape {tuple(tensor.shape)}")
        return found

    def _axes(self, node: Any) -> tuple[dict[Node, Axis], list[Axis | None]]:
        """The row axes of the tensors that a node reads, and of its results."""
        read = {}
        for given in node.all_input_nodes:
            for tensor in _tensors(value(given)):
                if (axis := self.axis(tensor)) is not None:
                    read[given] = axis
        return read, [self.axis(tensor) for tensor in _tensors(value(node))]

    # ---- what is inserted

    def _insert(self, before: Any, target: Any, *args: Any) -> Node:
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args)
        node.meta["val"] = target(*torch.fx.map_arg(args, value))
        node.meta["stack_trace"] = before.meta.get("stack_trace")
        return node

    def _after(self, name: str) -> Node:
        """Where the rows of a symbol are known."""
        node = self._sources[name].next
        while node.op == "placeholder":
            node = node.next
        return node

    def count(self, name: str) -> Node:
        """The number of live rows of a symbol, (1,) int32."""
        if name not in self._counts:
            node = self._insert(self._after(name), own.rows.default, self._sources[name])
            node.meta["rows"] = name
            self._counts[name] = node
        return self._counts[name]

    def live(self, name: str, axis: int, rank: int, before: Any) -> Node:
        """Which rows are live, as a tensor of that rank whose other axes are 1."""
        if name not in self._live:
            count = self.count(name)
            self._live[name] = self._insert(count.next, own.live.default, self._sources[name], count)
        node, shape = self._live[name], [1] * rank
        shape[axis] = -1
        return node if rank == 1 else self._insert(before, aten.view.default, node, shape)

    def _filled(self, tensor: Any, fill: float, before: Any) -> Node:
        """A tensor with ``fill`` in its dead rows."""
        axis = self.axis(value(tensor))
        assert axis is not None
        return self._insert(before, own.filled.default, tensor, self.count(axis[1]), axis[0], fill)

    # ---- the rules

    def _check(self, node: Any) -> None:
        """Let a node pass, write it anew, or raise Unknown."""
        target = node.target
        if is_number(node) or target in SYMBOLIC or target is operator.getitem:
            return
        if not isinstance(target, operator_kind):  # an operator on functions
            raise Unknown("what it means for each row is not known")
        if target is aten.copy_.default or target._schema.is_mutable:
            raise Unknown("it writes to a tensor of the caller")
        tags = target.tags
        if torch.Tag.nondeterministic_seeded in tags:
            raise Unknown("its random numbers are those of the scene's own rows")
        counts = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        if counts and not is_own(node):
            raise Unknown("how many rows it makes depends on values")
        read, made = self._axes(node)
        if target.namespace == "sparseconv":
            return self._check_own(node)
        if len({name for _, name in read.values()} | {axis[1] for axis in made if axis}) > 1:
            raise Unknown("it joins the rows of different grids")
        self._number_arguments(node)
        if not read and not any(made):
            return None
        if torch.Tag.pointwise in tags or target in ELEMENTWISE:
            return self._pointwise(node, read, made)
        rule = next((rule for known, rule in self._rules if target in known), None)
        if rule is None:
            raise Unknown("what it means for each row is not known")
        return rule(self, node, read, made)

    def _check_own(self, node: Any) -> None:
        if node.target._opname == "rows":
            axis = self.axis(value(node.args[0]))
            if axis is None or axis[0] != 0:
                raise Unknown("it counts what are no rows")
            node.meta["rows"] = axis[1]
        if node.target._opname == "batch_norm" and (axis := self.axis(value(node.args[0]))) is not None:
            self.least[axis[1]] = 2
        if node.target._opname in ("lookup", "execute"):
            raise Unknown("it is not written for arrays of fixed capacity")

    def _pointwise(self, node: Any, read: dict[Node, Axis], made: list[Axis | None]) -> None:
        ends = {value(n).ndim - a for n, (a, _) in read.items()} | {
            t.ndim - axis[0] for t, axis in zip(_tensors(value(node)), made) if axis
        }
        if len(ends) > 1 or not all(made):
            raise Unknown("it joins rows with another axis")

    def _number_arguments(self, node: Any) -> None:
        """Numbers that come from sizes or from the host, as they enter arithmetic: worked out on the device.

        Those in a shape are told by the shape. Any other place where a number of rows stands ends the region: over
        arrays of fixed capacity it would be that capacity.
        """
        pointwise = torch.Tag.pointwise in node.target.tags
        names = [argument.name for argument in node.target._schema.arguments]
        for name, given in [*zip(names, node.args), *node.kwargs.items()]:
            if name in SHAPES:
                continue
            for number in filter(is_number, _nodes(given)):
                if symbols(value(number)) & self.symbols and not (pointwise and name == "other" and number is given):
                    raise Unknown("a number of rows is an argument of it")
                if pointwise:
                    self._number_argument(node, name, number)

    def _number_argument(self, node: Any, name: str, given: Any) -> None:
        if isinstance(value(given), torch.SymBool):
            raise Unknown("a condition that depends on sizes is an argument of it")
        others = [value(n) for n in node.all_input_nodes if isinstance(value(n), torch.Tensor)]
        if not others or all(t.ndim == 0 for t in others) or any(t.dtype in HALVES for t in others):
            raise Unknown("a number that the host works out is an argument of it")
        twin = _with_tensor(node.target)
        if name != "other" or twin is None or node.kwargs:
            raise Unknown("a number that the host works out is an argument of it")
        if isinstance(value(given), torch.SymFloat) and not any(t.is_floating_point() for t in others):
            raise Unknown("a fraction is an argument of it beside integers")  # a tensor has another dtype than a number
        number = self._number(given, node)
        node.target, node.args = twin, tuple(number if n is given else n for n in node.args)

    def _number(self, node: Any, before: Any) -> Node:
        """A number as a tensor () on the device, int64 or float64."""
        if node in self._numbers:
            return self._numbers[node]
        names = symbols(value(node))
        if not names & self.symbols:
            kind = own.number.float if isinstance(value(node), torch.SymFloat) else own.number.int
            made = self._insert(_next(node), kind, self._any_source(), node)
        elif (name := symbol(value(node))) is not None and isinstance(value(node), torch.SymInt):
            count = self.count(name)
            wide = self._insert(count.next, aten._to_copy.default, count)
            wide.kwargs = {"dtype": torch.int64}
            wide.meta["val"] = value(count).to(torch.int64)
            made = self._insert(wide.next, aten.view.default, wide, [])
        else:
            if node.op != "call_function" or node.target not in NUMBERS:
                raise Unknown(f"a number of rows goes through {node.target}")
            if isinstance(value(node), torch.SymInt) and not self._is_int64(node):
                raise Unknown("a number that is worked out of rows may be larger than any int64")
            parts = [self._number(a, before) if isinstance(a, Node) else a for a in node.args]
            made = self._arithmetic(node, parts)
        self._numbers[node] = made
        return made

    def _is_int64(self, node: Node) -> bool:
        """Whether an integer that is worked out of numbers of rows, which are of int32, is an int64 for sure."""
        if any(isinstance(a, int) and abs(a) > 2**53 for a in node.args):
            return False
        if node.target not in (operator.mul, operator.pow):
            return True
        expr = value(node).node.expr
        most = {s: 2**31 if str(s) in self.symbols else 2**63 for s in expr.free_symbols}
        is_sum = expr.is_polynomial(*expr.free_symbols)
        return is_sum and all(abs(term).subs(most) <= 2**62 for term in expr.expand().as_ordered_terms())

    def _arithmetic(self, node: Any, parts: list[Any]) -> Node:
        place = max([p for p in parts if isinstance(p, Node)], key=self._order).next
        wanted = torch.float64 if isinstance(value(node), torch.SymFloat) else torch.int64
        numbers = [p for p in parts if isinstance(p, Node)]
        constants = [math.nan if isinstance(p, Node) else float(p) for p in parts]
        given = node.target.__name__, numbers, constants, wanted == torch.float64
        return self._insert(place, own.arithmetic.default, *given)

    def _order(self, node: Any) -> int:
        return {n: i for i, n in enumerate(self.graph.nodes)}[node]

    def _any_source(self) -> Node:
        return next(iter(self._sources.values()))

    # each rule takes a node, the row axes of what it reads, and those of its results

    def _same(self, node: Any, read: dict[Node, Axis], made: list[Axis | None]) -> None:
        if read and made[0] != read.get(node.args[0], made[0]):
            raise Unknown("it moves the rows")

    def _made(self, node: Any, read: dict[Node, Axis], made: list[Axis | None]) -> None:
        """New constants: rows alike, dead ones too."""

    def _view(self, node: Any, read: dict[Node, Axis], made: list[Axis | None]) -> None:
        (axis,), before, after = read.values(), value(node.args[0]).shape, value(node).shape
        if made[0] is None or not _equal(before[: axis[0]], after[: made[0][0]]):
            raise Unknown("it cuts across the rows")

    def _move(self, node: Any, read: dict[Node, Axis], made: list[Axis | None]) -> None:
        """The axes in another order."""

    def _expand(self, node: Any, read: dict[Node, Axis], made: list[Axis | None]) -> None:
        given = read.get(node.args[0])
        if given and made[0] and value(node.args[0]).ndim - given[0] != value(node).ndim - made[0][0]:
            raise Unknown("it moves the rows")

    def _slice(self, node: Any, read: dict[Node, Axis], made: list[Axis | None]) -> None:
        if node.target is aten.slice.Tensor and len(node.args) == 4 and node.args[2:] == (0, 2**63 - 1):
            return  # all of it
        given: Any = node.args[0]
        if given not in read or _argument(node, "dim", 0) % value(given).ndim == read[given][0]:
            raise Unknown("it goes along the rows")

    def _slice_backward(self, node: Any, read: dict[Node, Axis], made: list[Axis | None]) -> None:
        if made[0] is None or _argument(node, "dim", 0) % value(node).ndim == made[0][0]:
            raise Unknown("it goes along the rows")

    def _cat(self, node: Any, read: dict[Node, Axis], made: list[Axis | None]) -> None:
        dim = (node.args[1] if len(node.args) > 1 else 0) % value(node).ndim
        if made[0] is None or dim == made[0][0] or any(axis != made[0] for axis in read.values()):
            raise Unknown("it goes along the rows")
        if len(read) != len(set(node.args[0])):
            raise Unknown("it joins rows with what has none")

    def _along(self, node: Any, read: dict[Node, Axis], made: list[Axis | None]) -> None:
        dim = _argument(node, "dim", _argument(node, "dims", None))
        if dim is None and node.target in (aten.sort.default, aten.topk.default):
            dim = -1
        if dim is None:
            raise Unknown("it goes along the rows")
        tensors = [n for n in node.all_input_nodes if isinstance(value(n), torch.Tensor)]
        if len(read) != len(tensors):
            raise Unknown("it joins rows with what has none")
        ndim = value(tensors[0]).ndim
        axes = {d % ndim for d in (dim if isinstance(dim, (list, tuple)) else [dim])}
        if any(axis[0] in axes for axis in read.values()) or len(set(read.values())) > 1:
            if node.target not in SOFTMAX:
                raise Unknown("it goes along the rows")
            (given, axis) = next(iter(read.items()))
            mask = self.live(axis[1], axis[0], ndim, node)
            filled = self._insert(node, aten.where.ScalarOther, mask, given, -math.inf)
            filled.meta["fills"] = True  # its dead rows are read
            node.args = (filled, *node.args[1:])
        elif node.target is aten.gather.default:  # what dead rows hold is no index
            node.args = (*node.args[:2], self._filled(node.args[2], 0.0, node), *node.args[3:])

    def _reduce(self, node: Any, read: dict[Node, Axis], made: list[Axis | None]) -> None:
        (axis,) = read.values()
        given: Any = node.args[0]
        ndim = value(given).ndim
        dims = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else []
        if node.target in (aten.sum.default, aten.mean.default, aten.max.default, aten.min.default) or not dims:
            dims = list(range(ndim))
        if axis[0] not in {d % ndim for d in dims}:
            return
        if not value(given).is_floating_point() and node.target not in (aten.sum.default, aten.sum.dim_IntList):
            raise Unknown("it goes along the rows of integers")
        if node.target in MEANS:
            if node.kwargs.get("dtype") is not None:
                raise Unknown("it goes along the rows in another dtype")
            self._mean(node, given, axis)
            return
        if FILLED[node.target]:
            self.least.setdefault(axis[1], 1)
        node.args = (self._filled(given, FILLED[node.target], node), *node.args[1:])

    def _mean(self, node: Any, given: Any, axis: Axis) -> None:
        """A mean over the live rows: of the rows' own, as torch takes it over all of them, times all over live."""
        count = self.count(axis[1])
        keeps = bool(node.args[2]) if len(node.args) > 2 else False
        dims = list(node.args[1]) if node.target is aten.mean.dim else list(range(value(given).ndim))
        with self.graph.inserting_before(node):
            made = self.graph.call_function(
                own.mean_rows.default, (self._filled(given, 0.0, node), count, axis[0], dims, keeps)
            )
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)

    def _product(self, node: Any, read: dict[Node, Axis], made: list[Axis | None]) -> None:
        first, second = node.args[-2:]
        a, b = read.get(first), read.get(second)
        inner = value(first).ndim - 1
        if a and a[0] == inner:
            if not b or b[0] != inner - 1:
                raise Unknown("it goes along the rows of one factor")
            node.args = (*node.args[:-2], self._filled(first, 0.0, node), self._filled(second, 0.0, node))
        elif b and b[0] == value(second).ndim - 2:
            raise Unknown("it goes along the rows of one factor")

    def _layer_norm(self, node: Any, read: dict[Node, Axis], made: list[Axis | None]) -> None:
        place = 1 if node.target is aten.native_layer_norm.default else 2
        first = value(node.args[0]).ndim - len(node.args[place])
        if any(axis[0] >= first for n, axis in read.items() if value(n).ndim == value(node.args[0]).ndim):
            raise Unknown("it normalises along the rows")
        if node.target is aten.native_layer_norm_backward.default and any(node.args[7][1:]):
            # the gradients of its weight and bias are sums over the rows
            grad: Any = node.args[0]
            node.args = (self._filled(grad, 0.0, node), self._filled(node.args[1], 0.0, node), *node.args[2:])
            for place in (3, 4):
                node.args = tuple(self._filled(g, 0.0, node) if i == place else g for i, g in enumerate(node.args))

    def _batch_norm(self, node: Any, read: dict[Node, Axis], made: list[Axis | None]) -> None:
        x: Any = node.args[0]
        if self.axis(value(x)) != read[x] or read[x][0] != 0 or value(x).ndim != 2:
            raise Unknown("it normalises rows of more than two axes")
        if node.target is aten._native_batch_norm_legit.no_stats:
            x, weight, bias, training, momentum, eps = node.args
            mean = var = None
        else:
            x, weight, bias, mean, var, training, momentum, eps = node.args
        if not training:
            return
        count = self.count(read[x][1])
        node.target = own.batch_norm.default
        node.args = (x, weight, bias, mean, var, count, momentum, eps, False)
        self.least[read[x][1]] = 2

    def _batch_norm_eval(self, node: Any, read: dict[Node, Axis], made: list[Axis | None]) -> None:
        if read[node.args[0]][0] == 1:
            raise Unknown("rows are its channels")

    def _batch_norm_backward(self, node: Any, read: dict[Node, Axis], made: list[Axis | None]) -> None:
        grad, x, weight, mean, var, saved_mean, saved_std, training, eps, mask = node.args
        if read.get(x) != read.get(grad) or read[x][0] != 0 or value(x).ndim != 2:
            raise Unknown("it normalises rows of more than two axes")
        count = self.count(read[x][1])
        node.target = own.batch_norm_back.default
        node.args = (grad, x, weight, mean, var, saved_mean, saved_std, count, training, eps, list(mask))

    _rules: Sequence[tuple[Any, Any]] = (
        (COPIES, _same),
        (MADE, _made),
        (VIEWS, _view),
        (MOVES, _move),
        ({aten.expand.default}, _expand),
        (
            {aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int},
            _slice,
        ),
        ({aten.slice_backward.default, aten.select_backward.default}, _slice_backward),
        ({aten.cat.default}, _cat),
        (ALONG_AN_AXIS, _along),
        ({*FILLED, *MEANS}, _reduce),
        ({aten.mm.default, aten.addmm.default, aten.bmm.default}, _product),
        ({aten.native_layer_norm.default, aten.native_layer_norm_backward.default}, _layer_norm),
        (BATCH_NORMS, _batch_norm),
        ({aten._native_batch_norm_legit_no_training.default}, _batch_norm_eval),
        ({aten.native_batch_norm_backward.default}, _batch_norm_backward),
    )


HALVES = (torch.float16, torch.bfloat16)


def _nodes(given: Any) -> list[Node]:
    """The nodes that an argument holds."""
    found: list[Node] = []
    torch.fx.map_arg(given, found.append)
    return found


def _argument(node: Any, name: str, default: Any) -> Any:
    """An argument of an operator by its name."""
    names = [argument.name for argument in node.target._schema.arguments]
    place = names.index(name) if name in names else len(node.args)
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)


def _with_tensor(target: Any) -> Any:
    """The overload of a pointwise operator that takes a tensor in the place of a number."""
    packet = target._overloadpacket
    return getattr(packet, "Tensor", None) if target._overloadname in ("Tensor", "Scalar") else None


def _tensors(v: Any) -> list[torch.Tensor]:
    if isinstance(v, torch.Tensor):
        return [v]
    return [t for t in v if isinstance(t, torch.Tensor)] if isinstance(v, (list, tuple)) else []


def _equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes hold as many numbers, for sure."""
    return (
        math.prod(a) == math.prod(b)
        if all(type(n) is int for n in (*a, *b))
        else tuple(map(str, a)) == tuple(map(str, b))
    )


def _next(node: Any) -> Node:
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node
