"""Convolution, batch norm, residual and activation of a traced network as fewer operations.

Every pattern is told by the operators and by who reads their results, and each stands for the operators it replaces on
any device: `sparseconv.compiler.fused_operators` has both.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from sparseconv.compiler import fused_operators as fused_operators
from sparseconv.compiler.rows import aten, is_own, own, value

#: activations of torch by the name of the function of `sparseconv.pointwise` that a convolution ends with
ACTIVATIONS: dict[Any, str] = {
    aten.relu.default: "relu",
    aten.leaky_relu.default: "leaky_relu",
    aten.silu.default: "silu",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
}


def fuse_inference(module: GraphModule) -> None:
    """Fold batch norms in evaluation into the convolutions before them, with a residual and an activation after."""
    graph, place = module.graph, _places(module.graph)
    for conv in list(graph.nodes):
        if not is_own(conv, "convolve") or conv.args[6]:
            continue
        last, norm, residual = conv, None, None
        user = _only_user(last)
        if user is not None and user.target is aten._native_batch_norm_legit_no_training.default:
            first = _only_user(user)
            if user.args[0] is last and first is not None and first.target is operator.getitem and first.args[1] == 0:
                last, norm = first, user
                user = _only_user(last)
        if (other := _added(user, last)) is not None:
            last, residual = user, other
            user = _only_user(last)
        name, numbers = "", []
        if user is not None and user.target in ACTIVATIONS and user.args[0] is last:
            name = ACTIVATIONS[user.target]
            numbers = [float(user.args[1]) if len(user.args) > 1 else 0.01] if name == "leaky_relu" else []
            last = user
        if last is conv:
            continue
        weight, bias, mean, var, eps = (None,) * 5 if norm is None else (*norm.args[1:5], norm.args[6])
        taps = conv.args[2] if norm is None else _before_cast(conv.args[2])
        plan, x, _, own_bias, rows, groups, _ = conv.args
        after = residual if residual is not None and place[residual] > place[conv] else conv
        if norm is not None:
            after = max([after, norm], key=place.__getitem__)
        with graph.inserting_after(after):
            made = graph.call_function(
                own.convolve_norm_act.default,
                (plan, x, taps, own_bias, rows, groups, weight, bias, mean, var, eps, residual, name, numbers),
            )
        made.meta = dict(last.meta)
        place[made] = place[after] + 0.5
        last.replace_all_uses_with(made)
    _finish(module)


def fuse_training(module: GraphModule) -> None:
    """Join a residual and a ReLU to the batch norm before them, in the forward and in the backward pass."""
    graph, place = module.graph, _places(module.graph)
    for node in list(graph.nodes):
        if node.target is aten.detach.default:  # what autograd keeps of a result, for the backward pass
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for relu in list(graph.nodes):
        if relu.target is not aten.relu.default:
            continue
        last = relu.args[0]
        residual = None
        if last.target is aten.add.Tensor and len(last.users) == 1:
            for given in last.args:
                if _first_of_norm(given) and (other := _added(last, given)) is not None:
                    last, residual = given, other
                    break
        if not _first_of_norm(last) or len(last.users) != 1:
            continue
        norm: Any = last.args[0]
        results = {n.args[1]: n for n in norm.users}
        after = residual if residual is not None and place[residual] > place[norm] else norm
        early = [n for old in results.values() if old is not last for n in old.users if place[n] < place[after]]
        # the next running statistics may be put in their place later
        if any(n.target is not aten.copy.default or any(place[u] < place[after] for u in n.users) for n in early):
            continue
        with graph.inserting_after(after):
            made = graph.call_function(own.batch_norm_act.default, (*norm.args, residual, 0.0))
        made.meta = dict(norm.meta)
        end = made
        for number, old in results.items():
            like = relu if number == 0 else old
            with graph.inserting_after(end):
                end = graph.call_function(operator.getitem, (made, number))
            end.meta, place[end] = dict(like.meta), place[after] + 0.5
            like.replace_all_uses_with(end)
            results[number] = end
        for node in early:
            end.append(node)
            end = node
        _fuse_backward(graph, place, norm, results, residual)
    _finish(module)


def _fuse_backward(graph: Graph, place: dict[Node, float], norm: Node, results: dict[Any, Node], residual: Any) -> None:
    """The gradient of the ReLU within that of the norm."""
    y = results[0]
    gates = [n for n in y.users if n.target is aten.threshold_backward.default and n.args[1:] == (y, 0)]
    if len(gates) != 1:
        return
    gate = gates[0]
    backs = [n for n in gate.users if is_own(n, "batch_norm_back") and n.args[0] is gate]
    if len(backs) != 1 or backs[0].args[1] is not norm.args[0] or backs[0].args[5] is not results.get(1):
        return
    back: Any = backs[0]
    if residual is None and len(gate.users) != 1:
        return
    if any(n is not back and place.get(n, 0) < place[gate] for n in gate.users):
        return
    _, x, weight, _, _, mean, std, count, training, eps, mask = back.args
    if not training:
        return
    with graph.inserting_before(gate):
        made = graph.call_function(
            own.batch_norm_act_back.default,
            (gate.args[0], x, y, weight, norm.args[2], mean, std, count, eps, mask, residual is not None, 0.0),
        )
        made.meta = {k: v for k, v in back.meta.items() if k != "val"}
        made.meta["val"] = (*value(back), value(gate))
        news = []
        for number, like in [*enumerate(value(back)), (3, value(gate))]:
            new = graph.call_function(operator.getitem, (made, number))
            new.meta = {**{k: v for k, v in back.meta.items() if k != "val"}, "val": like}
            place[new] = place[gate]
            news.append(new)
    for old in list(back.users):
        old.replace_all_uses_with(news[old.args[1]])
        graph.erase_node(old)
    graph.erase_node(back)
    gate.replace_all_uses_with(news[3])


def _finish(module: GraphModule) -> None:
    _merge_numbers(module.graph)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()


def _merge_numbers(graph: Graph) -> None:
    """Work out once what is worked out of a number of rows; leave out copies into another tensor of the same kind."""
    known: dict[Any, Node] = {}
    for node in list(graph.nodes):
        mine = value(node)
        if node.op != "call_function" or not isinstance(mine, torch.Tensor):
            continue
        if node.target is aten.copy.default and len(node.args) == 2:
            onto, source = map(value, node.args)
            if (onto.dtype, onto.shape, onto.device) == (source.dtype, source.shape, source.device):
                node.replace_all_uses_with(node.args[1])
                graph.erase_node(node)
        elif "rows" in node.meta or node.target in (aten.gt.Scalar, aten.select.int, aten._to_copy.default):
            if tuple(mine.shape) not in ((), (1,)):
                continue
            args = node.meta.get("rows") or node.args
            key = node.target, args, tuple(node.kwargs.items())
            if key in known:
                node.replace_all_uses_with(known[key])
                graph.erase_node(node)
            else:
                known[key] = node


def _places(graph: Graph) -> dict[Node, float]:
    return {node: float(i) for i, node in enumerate(graph.nodes)}


def _only_user(node: Any) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _first_of_norm(node: Any) -> bool:
    return bool(
        isinstance(node, Node)
        and node.target is operator.getitem
        and node.args[1] == 0
        and is_own(node.args[0], "batch_norm")
    )


def _added(user: Any, to: Any) -> Any:
    """What ``user`` adds to a tensor, where it is of its shape and dtype; else None."""
    if user is None or user.target is not aten.add.Tensor or user.kwargs or len(user.args) != 2:
        return None
    other = user.args[1] if user.args[0] is to else user.args[0]
    if not isinstance(other, Node) or other is to:
        return None
    mine, its = value(to), value(other)
    if not isinstance(its, torch.Tensor) or its.dtype != mine.dtype or its.device != mine.device:
        return None
    return other if tuple(map(str, its.shape)) == tuple(map(str, mine.shape)) else None


def _before_cast(weight: Any) -> Any:
    """A weight before it was cast for autocast: it is folded in its own precision."""
    if isinstance(weight, Node) and weight.target is aten._to_copy.default and set(weight.kwargs) == {"dtype"}:
        return weight.args[0]
    return weight
