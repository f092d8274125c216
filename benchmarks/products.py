"""Times the products on a GPU against e3nn, cuequivariance and cuSPARSE; ``python benchmarks/products.py out.json``.

Every result is compared with an independent one before anything is timed; a wrong one stops the run. Times are medians
of CUDA events over about 0.4 s of repeats after warm-up, in ms. *Step* is forward and both gradients, *force* a
gradient of both gradients to everything they depend on; *force of y alone* has only the gradient to y, through which
positions enter, and its gradient.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.layers.machine import machine
from examples.equivariant_tensor_product import ChannelwiseTensorProduct, couple
from sparseconv.products import sparse_scale, sparse_scale_infos, sparse_vecsca

IRREPS = ((0, 1), (1, -1), (2, 1))
Step = Callable[[], Any]


def machine_and_peers() -> dict[str, Any]:
    """What the figures depend on; a peer that is not there, or cannot be loaded, by what it says."""
    found = machine("cuda")
    for name in ("e3nn", "cuequivariance", "cuequivariance_torch", "cuequivariance_ops_torch"):
        try:
            found["packages"][name] = importlib.import_module(name).__version__
        except (ImportError, OSError) as error:
            found["packages"][name] = f"absent ({error})"
    return found


def time_ms(step: Step, seconds: float = 0.4) -> float:
    """The median time of one call, by CUDA events."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    repeats = max(5, min(200, int(seconds * 1e3 / max(start.elapsed_time(end), 1e-3))))
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for first, last in pairs:
        first.record()
        step()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in pairs)


def three_steps(product: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """Forward, step and force of z = product(x, y)."""
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    with torch.no_grad():
        seed = torch.randn_like(product(x, y))

    def forward() -> None:
        with torch.no_grad():
            product(x, y)

    def step() -> None:
        torch.autograd.grad(product(x, y), (x, y), seed)

    def force() -> None:
        upstream = seed.detach().requires_grad_()
        grads = torch.autograd.grad(product(x, y), (x, y), upstream, create_graph=True)
        torch.autograd.grad(grads, (x, y, upstream), [torch.ones_like(g) for g in grads])

    def force_of_one() -> None:
        upstream = seed.detach().requires_grad_()
        (grad,) = torch.autograd.grad(product(x, y), (y,), upstream, create_graph=True)
        torch.autograd.grad(grad, (x, upstream), torch.ones_like(grad))

    times = {"forward": forward, "step": step, "force": force, "force of y alone": force_of_one}
    return {name: time_ms(one) for name, one in times.items()}


def check(name: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-6) -> None:
    """Stops the run where a result is wrong."""
    error = float((got.double() - wanted.double()).norm() / wanted.double().norm())
    if not error < tolerance:
        raise SystemExit(f"{name} is wrong: relative error {error:.2e}; nothing was timed")


def coupled_by_einsum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The tensor product through a dense table, in fp64: the judge."""
    paths = couple(IRREPS, IRREPS, IRREPS)
    table = torch.zeros(len(paths.path_of_row), 9, 9, dtype=torch.float64, device=x.device)
    for i, j, m, s in zip(paths.index1, paths.index2, paths.index_out, paths.scale):
        table[m, i, j] += s
    return torch.einsum("mij,nic,nj->nmc", table, x.double(), y.double())


def tensor_product(channels: int, batch: int = 100_000) -> dict[str, Any]:
    """The channelwise tensor product of 11 paths."""
    x = torch.randn(batch, 9, channels, device="cuda")
    y = torch.randn(batch, 9, device="cuda")
    layer = ChannelwiseTensorProduct(IRREPS, IRREPS, IRREPS).cuda()
    small = [t[:500].double().requires_grad_() for t in (x, y)]
    wanted = coupled_by_einsum(*small)
    seed = torch.randn(wanted.shape, device="cuda")
    few = [torch.zeros(batch, *t.shape[1:], device="cuda") for t in (x, y)]
    for target, source in zip(few, (x, y)):
        target[:500] = source[:500]
    few = [t.requires_grad_() for t in few]
    out = layer(*few)
    check("the tensor product", out[:500].detach(), wanted.detach())
    upstream = torch.zeros_like(out)
    upstream[:500] = seed
    got = torch.autograd.grad(out, few, upstream, create_graph=True)
    judged = torch.autograd.grad(wanted, small, seed.double(), create_graph=True)
    for name, g, w in zip(("its gradient to x", "its gradient to y"), got, judged):
        check(name, g[:500].detach(), w.detach())
    second = torch.autograd.grad([g.square().sum() for g in got], few)
    judged = torch.autograd.grad([g.square().sum() for g in judged], small)
    for name, g, w in zip(("its second gradient to x", "its second gradient to y"), second, judged):
        check(name, g[:500], w)
    del few, out, upstream, got, second
    result: dict[str, Any] = {"sparseconv": three_steps(lambda x, y: sparse_vecsca(x, y, *layer.infos), x, y)}
    for name, peer in (("e3nn", e3nn_product), ("cuequivariance", cuequivariance_product)):
        try:
            result[name] = peer(channels, x, y)
        except Exception as error:  # a peer that cannot run is a fact to report, not a reason to stop
            result[name] = f"not run: {type(error).__name__}: {error}"
    return result


def e3nn_product(channels: int, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """The same product in e3nn, on its own layout."""
    from e3nn import o3

    first = o3.Irreps(f"{channels}x0e + {channels}x1o + {channels}x2e")
    second = o3.Irreps("0e + 1o + 2e")
    paths: list[Any] = []
    outputs: list[Any] = []
    for i, (_, ir1) in enumerate(first):
        for j, (_, ir2) in enumerate(second):
            for ir in ir1 * ir2:
                if ir in second:
                    paths.append((i, j, len(outputs), "uvu", False))
                    outputs.append((channels, ir))
    product = o3.TensorProduct(first, second, o3.Irreps(outputs), paths).cuda()
    wide = torch.cat([x[:, s].transpose(1, 2).flatten(1) for s in (slice(0, 1), slice(1, 4), slice(4, 9))], 1)
    return three_steps(product, wide, y)


def cuequivariance_product(channels: int, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """The same product in cuequivariance-torch, on the layout it likes best, with weights of one."""
    import cuequivariance as cue
    import cuequivariance_torch as cuet

    first = cue.Irreps("O3", f"{channels}x0e + {channels}x1o + {channels}x2e")
    second = cue.Irreps("O3", "0e + 1o + 2e")
    kept = [item.ir for item in second]
    product = cuet.ChannelWiseTensorProduct(
        first, second, kept, layout=cue.ir_mul, shared_weights=True, internal_weights=False, device="cuda"
    )
    weights = torch.ones(1, product.weight_numel, device="cuda")
    return three_steps(lambda x, y: product(x, y, weights), x.flatten(1), y)


def scaled_sum(rows: int, terms: int, channels: int, local: bool) -> dict[str, float]:
    """A scaled segment sum beside cuSPARSE's CSR product and a pure gather."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    index_out = torch.randint(rows, (terms,), device="cuda", generator=generator)
    if local:
        index = (index_out + torch.randint(-32, 33, (terms,), device="cuda", generator=generator)).clamp(0, rows - 1)
    else:
        index = torch.randint(rows, (terms,), device="cuda", generator=generator)
    scale = torch.randn(terms, device="cuda", generator=generator)
    x = torch.randn(rows, channels, device="cuda", generator=generator)
    info, _ = sparse_scale_infos(index, index_out, scale, rows, rows)
    assert info.seg_out is not None
    assert info.index is not None
    assert info.scale is not None
    csr = torch.sparse_csr_tensor(info.seg_out.int(), info.index, info.scale, (rows, rows), check_invariants=False)
    some = info.seg_out[:1001].tolist()
    picked = slice(0, some[-1])
    owner = torch.repeat_interleave(torch.arange(1000, device="cuda"), info.seg_out[:1001].diff())
    wanted = torch.zeros(1000, channels, device="cuda", dtype=torch.float64)
    wanted.index_add_(0, owner, x.double()[info.index[picked]] * info.scale[picked, None].double())
    check("the scaled sum", sparse_scale(x, info)[:1000], wanted)
    return {
        "sparseconv": time_ms(lambda: sparse_scale(x, info)),
        "cusparse": time_ms(lambda: csr @ x),
    }


def main(path: str | None) -> None:
    """Runs the whole table, prints it, and writes it as JSON."""
    results: dict[str, Any] = {"machine": machine_and_peers(), "tensor_product": {}, "scaled_sum": {}}
    print(results["machine"])

    def keep() -> None:
        if path:
            Path(path).write_text(json.dumps(results, indent=1) + "\n")

    for channels in (64, 128):
        results["tensor_product"][f"C {channels}"] = found = tensor_product(channels)
        for name, times in found.items():
            text = times if isinstance(times, str) else " / ".join(f"{t:.3f}" for t in times.values())
            print(f"tensor product C {channels}: {name}: {text}", flush=True)
        keep()
    for rows, terms, channels in ((1_000_000, 16_000_000, 64), (200_000, 6_000_000, 128), (1_000_000, 8_000_000, 32)):
        for local in (False, True):
            key = f"M {rows}, T {terms}, C {channels}, {'local' if local else 'random'}"
            results["scaled_sum"][key] = found = scaled_sum(rows, terms, channels, local)
            print(f"scaled sum {key}: " + ", ".join(f"{name} {t:.3f}" for name, t in found.items()), flush=True)
            keep()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
