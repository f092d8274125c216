"""Random networks of torch's and spconv's parts, compiled and eager: results, gradients and buffers are the same.

``python -m tests.fuzz captures --count 300 --seed 0``. A case is drawn from the seed and its number alone: a dozen
operations, each of one or two earlier results, in training or in evaluation, some results returned and some unused.
Scenes have many sizes, and weights change between two of them. Rows that are no voxels hold NaN.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable

import torch
from torch.nn import functional

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn

CHANNELS, NORMS = 8, 3
MODES = ("training", "evaluation", "frozen")
#: parts of the largest value by which results, gradients and buffers may differ, in float64
LIMIT = 1e-9
Rows = torch.Tensor


class Net(torch.nn.Module):
    """Operations on the rows of a scene, drawn by a generator."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(_norm(rng) for _ in range(NORMS))
        self.convs = torch.nn.ModuleList(_convolution(rng, CHANNELS) for _ in range(2))
        self.blocks = torch.nn.ModuleList(
            spconv.SparseSequential(_convolution(rng, CHANNELS), _norm(rng), torch.nn.ReLU(inplace=True))
            for _ in range(2)
        )
        self.first, self.linear = _convolution(rng, 4), torch.nn.Linear(CHANNELS, CHANNELS)
        self.active = torch.nn.ReLU(inplace=rng.random() < 0.5)
        names = list(OPERATIONS)
        self.program = [
            (rng.choice(names), rng.random(), rng.random(), rng.randrange(NORMS)) for _ in range(rng.randint(4, 12))
        ]
        self.returned = [rng.random() for _ in range(rng.randint(1, 3))]

    def forward(self, coords: torch.Tensor, features: torch.Tensor) -> list[Rows]:
        x = self.first(spconv.SparseConvTensor(features, coords, [12, 12, 12], 2))
        made = [x.features]

        def drawn(part: float) -> Rows:
            """One of the results, a late one more often."""
            return made[max(0, len(made) - 1 - int(len(made) * part * part))]

        for name, one, other, number in self.program:
            made.append(OPERATIONS[name](self, x, drawn(one), drawn(other), number))
        last = self.convs[0](x.replace_feature(made[-1])).features
        return [*(drawn(part) for part in self.returned), last]


def _norm(rng: random.Random) -> torch.nn.BatchNorm1d:
    norm = torch.nn.BatchNorm1d(CHANNELS, eps=1e-3, momentum=rng.choice((0.1, 0.01)), affine=rng.random() < 0.9)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm


def _convolution(rng: random.Random, channels: int) -> torch.nn.Module:
    return spconv.SubMConv3d(channels, CHANNELS, 3, padding=1, bias=rng.random() < 0.5, indice_key="a")


def _added_in_place(net: Net, x: spconv.SparseConvTensor, p: Rows, q: Rows, i: int) -> Rows:
    y = net.norms[i](p)
    y += q
    return y


def _without_gradient(net: Net, x: spconv.SparseConvTensor, p: Rows, q: Rows, i: int) -> Rows:
    with torch.no_grad():
        y = net.norms[i](p) * 0.1
    return y + q


OPERATIONS: dict[str, Callable[[Net, spconv.SparseConvTensor, Rows, Rows, int], Rows]] = {
    "norm": lambda net, x, p, q, i: net.norms[i](p),
    "norm, added in place": _added_in_place,
    "norm without a gradient": _without_gradient,
    "norm and activation": lambda net, x, p, q, i: net.active(net.norms[i](p)),
    "ReLU": lambda net, x, p, q, i: functional.relu(p),
    "ReLU in place": lambda net, x, p, q, i: torch.relu_(p * 1),
    "ReLU of a sum": lambda net, x, p, q, i: torch.relu(net.norms[i](p) + q),
    "sum": lambda net, x, p, q, i: p + q,
    "difference": lambda net, x, p, q, i: p - q,
    "leaky ReLU": lambda net, x, p, q, i: functional.leaky_relu(p, 0.1),
    "part without a gradient": lambda net, x, p, q, i: p.detach() * 0.3 + q,
    "channels of two": lambda net, x, p, q, i: torch.cat([p[:, :4], functional.relu(q[:, 4:])], 1),
    "view": lambda net, x, p, q, i: p.view(-1, CHANNELS),
    "linear": lambda net, x, p, q, i: net.linear(p),
    "convolution": lambda net, x, p, q, i: net.convs[i % 2](x.replace_feature(p)).features,
    "block": lambda net, x, p, q, i: net.blocks[i % 2](x.replace_feature(p)).features,
}


def run(seed: int, number: int) -> str:
    """How a case ended: "replayed", "eager", "refused by torch", or what is different."""
    rng = random.Random(f"{seed}/{number}")
    torch.manual_seed(rng.randrange(2**31))
    mode, net = rng.choice(MODES), Net(rng).double()
    net.train(mode == "training").requires_grad_(mode != "frozen")
    try:
        _called(copy.deepcopy(net), copy.deepcopy(net), 0, mode)
    except RuntimeError:  # a write in place into what a gradient needs
        return "refused by torch"
    twin = copy.deepcopy(net)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="sparseconv", options={"poison": True})
    for scene in range(1, 7):
        mine, theirs = _called(net, compiled, scene, mode), _called(twin, twin, scene, mode)
        for (what, got), (_, wanted) in zip(mine, theirs, strict=True):
            most = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
            if got.shape != wanted.shape or not torch.allclose(got, wanted, rtol=0, atol=LIMIT * most):
                return f"different: {what} of scene {scene} in {mode}, {net.program}"
        if scene == 3:
            with torch.no_grad():
                for p in (*net.parameters(), *twin.parameters()):
                    p.mul_(1.1)
    return "replayed" if "replayed" in nn.explain(net) else "eager"


def _called(net: Net, call: Callable[..., list[Rows]], scene: int, mode: str) -> list[tuple[str, torch.Tensor]]:
    """Results, gradients and buffers of a call, by their names."""
    generator = torch.Generator().manual_seed(scene)
    voxels = torch.randint(0, 12, (40 + 10 * scene, 3), generator=generator)
    coords = torch.unique(torch.cat([voxels[:, :1] % 2, voxels], 1), dim=0).int()
    features = torch.randn(len(coords), 4, generator=generator, dtype=torch.float64)
    net.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(mode == "training"):
        results = call(coords, features)
        if mode == "training":
            sum((y / y.numel()).square().sum() + y.mean() for y in results).backward()
    gradients = [(f"gradient of {name}", p.grad) for name, p in net.named_parameters() if p.grad is not None]
    named = [(f"result {i}", y.detach()) for i, y in enumerate(results)]
    return [*named, *gradients, *((f"buffer {name}", b.clone()) for name, b in net.named_buffers())]


def main(count: int, seed: int) -> list[str]:
    """What is different, in words; how the others ended is printed."""
    ended = {number: run(seed, number) for number in range(count)}
    print(*(f"{times:6} {how}" for how, times in Counter(ended.values()).items() if "different" not in how), sep="\n")
    return [f"case {number}: {how}" for number, how in ended.items() if how.startswith("different")]
