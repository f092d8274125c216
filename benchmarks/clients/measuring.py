"""One client in one dtype: its steps and inference, eager, accelerated or compiled."""

from __future__ import annotations

import argparse
import copy
import gc
import resource
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.clients.networks import make
from benchmarks.clients.scenes import Client, Setting, loss_of, tensors
from benchmarks.clients.timing import busy, timed


class Calls:
    """Steps and inference of a network, in one dtype."""

    def __init__(self, net: torch.nn.Module, call: Callable[..., Any], device: str, dtype: str) -> None:
        self.net, self.call, self.device, self.dtype = net, call, device, dtype

    def autocast(self) -> Any:
        kind = torch.float16 if self.dtype == "fp16" else torch.bfloat16
        return torch.autocast(self.device, kind, enabled=self.dtype in ("fp16", "bf16"))

    def forward(self, scene: Any) -> Any:
        with self.autocast():
            return self.call(self.net, scene)

    def step(self, scene: Any) -> None:
        self.net.zero_grad(set_to_none=True)
        loss_of(self.forward(scene)).backward()


def compare(client: Client, calls: Calls, twin: Calls) -> dict[str, float]:
    """The largest difference of results, and of all gradients together, as parts of their norms."""
    worst = {"result_off": 0.0, "gradients_off": 0.0}
    for scene in client.scenes:
        found = []
        for each in (calls, twin):
            each.net.zero_grad(set_to_none=True)
            y = each.forward(scene)
            loss_of(y).backward()
            grads = torch.cat([p.grad.double().flatten() for p in each.net.parameters() if p.grad is not None])
            found.append((torch.cat([t.detach().double().flatten() for t in tensors(y)]), grads))
        (y, g), (y2, g2) = found
        worst["result_off"] = max(worst["result_off"], float((y - y2).norm() / y2.norm()))
        worst["gradients_off"] = max(worst["gradients_off"], float((g - g2).norm() / g2.norm()))
    return {key: float(f"{value:.3g}") for key, value in worst.items()}


def compiled(client: Client, eager: Calls, repeats: int) -> dict[str, Any]:
    """The same under `torch.compile`; how many graphs it made, and why it left them, as Dynamo counts."""
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    dynamo.reset()
    counters.clear()
    calls = Calls(client.net, torch.compile(client.call), eager.device, eager.dtype)
    client.net.train()
    began = time.perf_counter()
    calls.step(client.scenes[0])
    _wait(eager.device)
    row: dict[str, Any] = {"first_s": round(time.perf_counter() - began, 1)}
    calls.step(client.scenes[1])  # of another size: its sizes become symbols
    _wait(eager.device)
    row["two_s"] = round(time.perf_counter() - began, 1)
    for scene in client.scenes * 2:  # parts are traced anew until Dynamo's limits are reached
        calls.step(scene)
    row["step"] = timed(calls.step, client.scenes, repeats)
    row["graphs"] = counters["stats"]["unique_graphs"]
    row["breaks"] = {reason.strip().splitlines()[0][:160]: n for reason, n in counters["graph_break"].items()}
    client.net.eval()
    with torch.no_grad():  # Dynamo fails in inference_mode where a module holds an array of numpy's
        for scene in client.scenes * 2:
            calls.forward(scene)
        row["inference"] = timed(calls.forward, client.scenes, repeats)
    dynamo.reset()
    return row


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(args: argparse.Namespace, name: str, dtype: str) -> dict[str, Any]:
    """A row: first calls, a step, inference, memory; with the options, what each adds."""
    gc.collect()  # the network before this one, if anything holds it in a circle
    began = time.perf_counter()
    client = make(name, Setting(args.clients, args.data, args.device, reach=args.reach))
    net, scenes = client.net, client.scenes
    row: dict[str, Any] = {"client": name, "dtype": dtype, "library": args.library, "accelerated": args.accelerate}
    row["voxels"] = [len(s[1]) for s in scenes]
    calls = Calls(net, client.call, args.device, dtype)
    twin = Calls(copy.deepcopy(net), client.call, args.device, dtype) if args.check else None
    if args.accelerate:
        import sparseconv as sc

        sc.accelerate(net)
    if twin is not None:
        row.update(compare(client, calls, twin))
        twin = None
    if args.device == "cpu":
        began = time.perf_counter()  # the scans are no part of a first step
        calls.step(scenes[0])
        row["first_s"] = round(time.perf_counter() - began, 2)
        row["step"] = timed(calls.step, scenes, args.repeats)
        row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10
    else:
        row.update(_steps_of_a_card(calls, scenes, args, began))
    net.eval()
    try:
        with torch.inference_mode():
            row["inference"] = timed(calls.forward, scenes, args.repeats)
            if args.busy:
                row["inference"] |= busy(calls.forward, scenes)
    except (RuntimeError, AssertionError) as error:  # of a library that has no kernel for it
        row["inference_error"] = str(error).strip().splitlines()[-1][:200]
    if args.accelerate:
        from sparseconv import nn

        row["explained"] = nn.explain(net)
    if args.compiled:
        row["compiled"] = compiled(client, calls, args.repeats)
    return row


def _steps_of_a_card(calls: Calls, scenes: list[Any], args: argparse.Namespace, began: float) -> dict[str, Any]:
    row: dict[str, Any] = {}
    calls.step(scenes[0])
    torch.cuda.synchronize()
    row["first_s"] = round(time.perf_counter() - began, 1)
    for scene in scenes[:4]:
        calls.step(scene)
    torch.cuda.synchronize()
    row["five_s"] = round(time.perf_counter() - began, 1)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    row["step"] = timed(calls.step, scenes, args.repeats)
    row["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
    row["allocated_mib"] = round(torch.cuda.memory_allocated() / 2**20)
    row["reserved_mib"] = round(torch.cuda.memory_reserved() / 2**20)
    if args.busy:
        row["step"] |= busy(calls.step, scenes)
    return row
