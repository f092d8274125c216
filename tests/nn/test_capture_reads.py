"""Calls that make their scene: numbers made before it and used after it, and what arguments hold beside it.

A graph that begins in the middle of a call must not hold what Python read of another call.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from sparseconv.nn.capturing.reads import _read_from, variables_ahead
from sparseconv.nn.capturing.values.read_dict import EVERY, ReadDict
from sparseconv.nn.capturing.values.telling import MISSING, told
from tests.nn.test_capture_module import DEVICE, LIMIT, WIDE, coords_of, features_of, replays, same
from tests.nn.test_capture_module import _graphs as _graphs  # the stand-in for a card's graphs


class Net(torch.nn.Module):
    """A layer, and a forward that is given."""

    def __init__(self, run):
        super().__init__()
        self.conv, self.run = spconv.SubMConv3d(4, 8, 3, padding=1), run

    def forward(self, batch, *args, **kwargs):
        return self.run(self, batch, *args, **kwargs)


def scene(batch, shape=(16, 16, 16)):
    return spconv.SparseConvTensor(batch["x"], batch["coords"], list(shape), 2)


def largest(batch):
    return float(batch["x"].abs().max())


def number(self, batch):
    scale = largest(batch)
    return self.conv(scene(batch)).features * scale


def in_a_dict(self, batch):
    info = {"scales": [largest(batch)]}
    return self.conv(scene(batch)).features * info["scales"][0]


def of_a_loop(self, batch):
    y = 0
    for scale in (largest(batch), 2.0):
        y = y + self.conv(scene(batch)).features * scale
    return y


def seen_by_a_function(self, batch):
    scale = largest(batch)

    def after(y):
        return y * scale

    return after(self.conv(scene(batch)).features)


def in_a_handler(self, batch):
    scale = largest(batch)
    try:
        y = self.conv(scene(batch)).features
        raise KeyError
    except KeyError:
        return y * scale


def first_factor(self, batch):
    return largest(batch) * self.conv(scene(batch)).features


def attribute(self, batch):
    self.scale = largest(batch)
    return self.conv(scene(batch)).features * self.scale


def rows(self, batch):
    return self.conv(scene(batch)).features / batch["coords"].shape[0]


def length(self, batch):
    coords = batch["coords"]
    return self.conv(scene(batch)).features / len(coords)


def number_returned(self, batch):
    count = len(batch["x"])
    return self.conv(scene(batch)).features, count


def tensor_returned(self, batch):
    coords = batch["coords"].long()
    return self.conv(scene(batch)).features, coords


def entries_summed(self, batch):
    y = self.conv(scene(batch)).features
    return y * sum(value for value in batch.values() if isinstance(value, int))


#: what must stay eager, and why
EAGER = {
    number: "its variables scale are others in every call",
    in_a_dict: "its variables info are others in every call",
    of_a_loop: "its variables scale are others in every call",
    seen_by_a_function: "its variables scale are others in every call",
    in_a_handler: "its variables scale are others in every call",
    first_factor: "its results for another scene differ",
    attribute: "its arguments are others in every call",
    rows: "it asks for the rows of an argument",
    length: "it asks for the rows of an argument",
    number_returned: "its variables count are others in every call",
    tensor_returned: "it returns a tensor",
    entries_summed: "its arguments are others in every call",
}


def box(self, batch):
    shape = (batch["coords"][:, 1:].amax(0) + 1).tolist()
    return self.conv(scene(batch, shape)).features


def box_given(self, batch, shape, items=2):
    return self.conv(spconv.SparseConvTensor(batch["x"], batch["coords"], shape, items)).features


def overwritten(self, batch):
    n = len(batch["x"])
    x = scene(batch, (16 + n % 2, 16, 16))
    y = self.conv(x).features
    n = 3
    return y * n


def entry(self, batch):
    y = self.conv(scene(batch)).features
    return y * 2 if batch["flag"] else y


def entry_that_may_be_there(self, batch):
    y = self.conv(scene(batch)).features
    return y * batch.get("late", 1)


def argument(self, batch, flag=False):
    y = self.conv(scene(batch)).features
    return y * 3 if flag else y


def attribute_of_few_values(self, batch):
    self.is_large = len(batch["x"]) > 150
    y = self.conv(scene(batch)).features
    return y * 2 if self.is_large else y


def attribute_that_nobody_reads(self, batch):
    self.calls = getattr(self, "calls", 0) + 1
    return self.conv(scene(batch)).features


def filled_in(self, batch):
    x = scene(batch)
    batch["y"] = self.conv(x).features
    batch.update({"z": batch["y"] * 2})
    batch["sum"] = batch["y"] + batch["z"]
    return batch


#: what must be replayed, and eager calls before that
REPLAYED = {
    box: 3,
    box_given: 3,
    overwritten: 3,
    entry: 4,
    entry_that_may_be_there: 4,
    argument: 4,
    attribute_of_few_values: 4,
    attribute_that_nobody_reads: 2,
    filled_in: 2,
}


def batch_of(call):
    """What a detector's loader gives: much of it differs from call to call."""
    coords = coords_of(call, 100 + 7 * call, extent=8 + call % 5)
    return {
        "x": features_of(call, coords).to(WIDE),
        "coords": coords,
        "flag": call % 3 == 0,
        "frame_id": np.array([f"{call:06d}", "000000"]),
        "metadata": [{"token": str(call)}],
        "gt_boxes": torch.randn(2, 3 + call, 8),
        "epoch": call,
        **({"late": 7} if call % 4 == 1 else {}),
    }


def calls_beside_a_twin(run, calls):
    """The captured module, after calls with the results and gradients of an eager twin."""
    torch.manual_seed(0)
    net = Net(run).to(DEVICE, WIDE)
    twin = copy.deepcopy(net)
    nn.capture(net)
    for call in range(calls):
        more = {box_given: [[16 + call, 16, 16]], argument: [call % 4 == 0]}.get(run, [])
        found = []
        for one in (net, twin):
            out = one(batch_of(call), *more)
            parts = [out[k] for k in ("sum", "y", "z", "epoch")] if isinstance(out, dict) else pytree.tree_leaves(out)
            one.zero_grad()
            parts[0].square().sum().backward()
            found.append([torch.as_tensor(part) for part in parts] + [one.conv.weight.grad])
        same(*found, LIMIT)
    return net


@pytest.mark.parametrize("run", EAGER, ids=lambda run: run.__name__)
def test_what_a_graph_would_hold_of_another_call_keeps_calls_eager(run):
    net = calls_beside_a_twin(run, 20)
    assert EAGER[run] in nn.explain(net)
    assert replays(net) <= 1, nn.explain(net)


@pytest.mark.parametrize("run", REPLAYED, ids=lambda run: run.__name__)
def test_what_the_graph_does_not_read_may_differ(run):
    net = calls_beside_a_twin(run, 20)
    assert replays(net) >= 20 - REPLAYED[run] - 1, nn.explain(net)


def test_a_class_that_allows_no_others_is_captured():
    class Final(Net):
        def __init_subclass__(cls):
            raise TypeError("nobody derives from this")

    net = nn.capture(Final(attribute_that_nobody_reads).to(DEVICE, WIDE))
    for call in range(4):
        net(batch_of(call))
    assert replays(net) == 2, nn.explain(net)


def test_functions_of_a_prompt_are_looked_at():
    """They have no file, as those of a notebook may have none."""
    text = "def run(self, batch):\n    most = batch['x'].amax()\n    return self.conv(scene(batch)).features * most"
    space = {"scene": scene}
    exec(compile(text, "<stdin>", "exec"), space)
    net = calls_beside_a_twin(space["run"], 5)
    assert "mul reads a tensor (), made before the region, at <stdin>:3" in nn.explain(net)


def test_a_module_that_is_compared_keeps_no_trace():
    """Nothing of the classes that look at attributes stays, nor what they held."""
    net = calls_beside_a_twin(attribute_of_few_values, 8)
    assert type(net) is Net
    assert "is_large" in vars(net)
    gc.collect()
    gc.disable()
    try:
        calls_beside_a_twin(attribute_of_few_values, 8)
        left = [kind for kind in Net.__subclasses__() if kind in set(map(type, gc.get_objects()))]
    finally:
        gc.enable()
    assert left == []


FUNCTIONS = {
    "overwritten": ("a, b, c = 1, 2, 3", "here()", "a = 4", "return a + b"),
    "loop": ("a, b, d = 1, 2, 0", "for _ in range(2):", "    d += a", "    here()", "    a = b", "return d"),
    "branches": ("a, b, c = 1, 2, 3", "here()", "if a:", "    return b", "else:", "    b = 4", "return b + c"),
    "handler": ("a, b = 1, 2", "try:", "    here()", "except ValueError:", "    return a", "b = 3", "return b"),
    "finally": ("a, b = 1, 2", "try:", "    here()", "finally:", "    a = b", "return a"),
    "context": ("a, b = 1, 2", "with suppress(ValueError):", "    here()", "return a"),
    "comprehension": ("a, b = 1, [2]", "here()", "return [a for _ in b]"),
    "function": ("a, b = 1, 2", "f = lambda: a", "here()", "return f()"),
    "same line": ("a, b, c = 1, 2, 3", "return here(), a, [c]"),
}
READ = {
    "overwritten": {"b"},
    "loop": {"b", "d"},
    "branches": {"a", "b", "c"},
    "handler": {"a"},
    "finally": {"b"},
    "context": {"a"},
    "comprehension": {"a", "b"},
    "function": {"a", "f"},
    "same line": {"a", "c"},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_variables_that_the_rest_of_a_function_reads(name):
    found = []

    def here():
        frame = sys._getframe(1)
        found.append(set(_read_from(frame.f_code, frame.f_lasti)) & {"a", "b", "c", "d", "f"})

    space = {"here": here, "suppress": contextlib.suppress}
    exec("def run():\n    " + "\n    ".join(FUNCTIONS[name]), space)
    space["run"]()
    assert found[0] == READ[name]


def test_variables_of_all_functions_up_to_one():
    found = {}

    def inner(a, b):
        found.update(variables_ahead(outer.__code__))
        return a

    def middle(c):
        return inner(1, 2), c

    def outer(d):
        return middle([3]), d

    assert outer(4) == ((1, [3]), 4)
    assert {name: found.get(name) for name in "abcd"} == {"a": 1, "b": None, "c": [3], "d": None}


def test_what_is_read_of_a_dict():
    def reads(use):
        found = []
        use(ReadDict({"a": 1, "b": 2}, found.append))
        return found

    assert reads(lambda d: d["a"]) == reads(lambda d: d.get("a")) == reads(lambda d: d.pop("a")) == ["a"]
    assert reads(lambda d: "c" in d) == reads(lambda d: d.get("c", 0)) == reads(lambda d: d.setdefault("c", 0)) == ["c"]
    for use in (dict, list, len, lambda d: {**d}, lambda d: d.copy(), lambda d: d.items(), lambda d: d == {}):
        assert EVERY in reads(use)
    assert reads(lambda d: d.update(c=1) or d["c"]) == []
    assert reads(lambda d: d.__setitem__("a", 1) or d["a"]) == []


def test_values_that_tell_calls_apart():
    t = torch.zeros(3, 2)
    assert told(t) == told(torch.ones(5, 2)) != told(torch.zeros(3, 3))
    assert len({told(1), told(1.0), told(True)}) == 3
    assert told([1, {"a": (2,)}]) == told([1, {"a": (2,)}]) != told([1, {"a": (3,)}])
    assert told({1, 2, 3}) == told({3, 2, 1}) != told({1, 2})
    assert told(np.float32(2)) == told(np.float32(2)) != told(np.float32(3))
    assert told(np.arange(3)) == told(np.arange(3)) != told(np.arange(4))
    assert told(MISSING) == told(MISSING) != told(None)
    assert told(torch.nn.ReLU()) is None
    assert told(one := object()) == told(one) != told(object())
    bare = type("Bare", (), {"__slots__": ()})  # as an extension's, which may hold what nobody sees
    assert told(one := bare()) == told(one) != told(bare())
    assert told(list(range(2000))) != told(list(range(2000)))  # too many to look at in every call
