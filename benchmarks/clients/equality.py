"""One seeded step in fp64 on the CPU: outputs, gradients and buffers, written to a file or compared with one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from benchmarks.clients.networks import make
from benchmarks.clients.scenes import Client, Setting

#: cells that are kept on each side of the middle, so that a step in fp64 takes seconds
REACH = 96
#: a gradient smaller than this part of all together is rounding: of a bias before a norm, whose gradient is zero
NOTHING = 1e-10


def fill(net: torch.nn.Module) -> None:
    """The same parameters whichever library made the layers, and whichever random numbers it drew for that."""
    for number, (_, p) in enumerate(sorted(net.named_parameters())):
        drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        if p.ndim > 1:
            drawn *= (2 * len(p) / p.numel()) ** 0.5  # out first, then what it sums over
        else:
            drawn = drawn / 4 + (1.0 if p.detach().mean() > 0.5 else 0.0)  # scales of norms, shifts
        with torch.no_grad():
            p.copy_(drawn)


def _placed(answer: Any) -> list[torch.Tensor]:
    """An answer in an order that no library chooses: sparse tensors are made dense."""
    if isinstance(answer, tuple):
        return [tensor for part in answer for tensor in _placed(part)]
    return [answer if isinstance(answer, torch.Tensor) else answer.dense()]


@torch.no_grad()
def _evaluated(client: Client, scene: Any) -> Any:
    """An answer in evaluation mode; convolutions are left in training where spconv has none with a bias on a CPU."""
    try:
        return client.call(client.net.eval(), scene)
    except AssertionError:
        for module in client.net.modules():
            module.training = hasattr(module, "indice_key")
        return client.call(client.net, scene)


def step(client: Client) -> dict[str, torch.Tensor]:
    """Outputs in training and in evaluation, gradients of the features and of every parameter, and buffers."""
    net = client.net.double()
    fill(net)
    x = client.scenes[0][0].double().requires_grad_()
    scene = (x, *client.scenes[0][1:])
    found, loss = {}, torch.zeros((), dtype=torch.float64)
    for number, y in enumerate(_placed(client.call(net, scene))):
        cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        loss = loss + (y * cotangent).sum()
        found[f"output {number}"] = y.detach().clone()
    loss.backward()
    assert x.grad is not None
    found["gradient of the features"] = x.grad.clone()
    found.update({f"gradient of {name}": p.grad for name, p in net.named_parameters() if p.grad is not None})
    found.update({f"buffer {name}": b.clone() for name, b in net.named_buffers()})
    for number, y in enumerate(_placed(_evaluated(client, scene))):
        found[f"evaluated {number}"] = y.clone()
    return found


def differences(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The largest relative difference of each kind, its name, and gradients that are rounding alone."""
    if mine.keys() != theirs.keys():
        raise ValueError(f"one has what the other has not: {sorted(mine.keys() ^ theirs.keys())}")
    gradients = [t for name, t in theirs.items() if name.startswith("gradient")]
    least = NOTHING * float(torch.stack([g.norm() for g in gradients]).norm())
    row: dict[str, Any] = {"output": 0.0, "evaluated": 0.0, "buffer": 0.0, "gradient": 0.0}
    worst, nothing = "", 0
    for name, a in mine.items():
        b, kind = theirs[name], name.split()[0]
        if a.shape != b.shape:
            raise ValueError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}")
        a, b = a.double(), b.double()
        if kind == "gradient" and float(b.norm()) < least:
            nothing += 1
            if float(a.norm()) < least:
                continue
        off = float((a - b).norm() / b.norm()) if bool(b.any()) else float(a.norm())
        if off > row[kind] or math.isnan(off):  # a NaN is the worst, and stays
            row[kind] = off
            worst = name if kind == "gradient" else worst
    row = {kind: float(f"{off:.2g}") for kind, off in row.items()}
    return {**row, "worst_gradient": worst, "gradients": len(gradients), "of_rounding_alone": nothing}


def equal(file: Path, names: list[str], setting: Setting, library: str) -> list[dict[str, Any]]:
    """Writes a step of each client to the file; where there is one, compares with it instead."""
    torch.set_num_threads(1)  # with more, spconv's results on a CPU change from run to run
    kept = torch.load(file) if file.is_file() else None
    setting = setting._replace(device="cpu", scans=2, reach=setting.reach or REACH)
    rows, found = [], {}
    for name in names:
        client = make(name, setting)
        mine = step(client)
        row: dict[str, Any] = {"client": name, "library": library, "voxels": len(client.scenes[0][1])}
        if kept is None:
            found[name] = mine
            torch.save({"library": library, "clients": found}, file)
        else:
            row |= {"with": kept["library"], **differences(mine, kept["clients"][name])}
        rows.append(row)
        print(row, flush=True)
    return rows
