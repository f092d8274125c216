"""What threads that meet on one map get: launches hold the addresses of its arrays, so none is ever replaced."""

from __future__ import annotations

import threading

import pytest
import torch

import sparseconv as sc
from sparseconv.geometry.kernel_map import KernelMap

DTYPES = torch.float16, torch.bfloat16, torch.float32


def test_an_array_that_another_thread_has_kept_meanwhile_stays(monkeypatch):
    coords = torch.unique(torch.randint(0, 6, (100, 3), generator=torch.Generator().manual_seed(0)), dim=0)
    grid = sc.VoxelGrid(torch.nn.functional.pad(coords, (1, 0)).int())
    for name in ("neighbors", "pairs", "half_pairs"):
        kernel_map = sc.ConvolutionPlan(grid, 3).kernel_map
        kernel_map.in_rows, kernel_map.neighbors
        kernel_map.__dict__.pop(name, None)
        prop, first = KernelMap.__dict__[name], []
        unpatched = prop.func

        def meanwhile(asked, prop=prop, unpatched=unpatched, first=first):
            monkeypatch.setattr(prop, "func", unpatched)
            first.append(prop.__get__(asked))  # another thread's whole call
            return unpatched(asked)

        monkeypatch.setattr(prop, "func", meanwhile)
        assert getattr(kernel_map, name) is first[0]
        assert getattr(kernel_map, name) is first[0]


@pytest.mark.gpu
def test_threads_whose_first_calls_meet_on_one_map():
    gen = torch.Generator().manual_seed(0)
    coords = torch.unique(torch.randint(0, 40, (30_000, 3), generator=gen), dim=0)
    coords = torch.nn.functional.pad(coords, (1, 0)).int().cuda()
    operands = [
        (torch.randint(-2, 3, (len(coords), 32), device="cuda").to(d), torch.randint(-2, 3, (27, 32, 32)).cuda().to(d))
        for d in DTYPES
    ]

    def step(plan, x, w):
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = plan.execute(x, w)
        return [y.detach(), *torch.autograd.grad(y, (x, w), torch.ones_like(y))]

    def plans():
        grid = sc.VoxelGrid(coords)
        return [sc.ConvolutionPlan(grid, 3), sc.ConvolutionPlan(grid, 3, stride=2)]

    want = [[step(plan, *o) for o in operands] for plan in plans()]
    wrong = []
    for _ in range(12):
        shared, gate = plans(), threading.Barrier(9)

        def work(number, shared=shared, gate=gate):
            which = number % len(DTYPES)
            gate.wait()
            for at, plan in enumerate(shared):
                for again in range(3):
                    got = step(plan, *operands[which])
                    wrong.extend(
                        (at, which, again, i)
                        for i, (a, b) in enumerate(zip(got, want[at][which]))
                        if not torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2.0)
                    )

        threads = [threading.Thread(target=work, args=(number,)) for number in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
