"""A run as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparseconv.geometry.aside import Aside


def has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def graph_of(run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """What replays a run, and what the run returned: tensors that every replay writes anew.

    On streams of its own. The peak that torch keeps of its memory starts anew.
    """
    with torch.cuda.device(device):
        stream, graph = torch.cuda.Stream(priority=-1), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # alone: what is timed on first use is timed here
            torch.cuda.reset_peak_memory_stats()
            before, aside = torch.cuda.memory_allocated(), Aside(device)
            with aside.run():
                run()
            again = Aside(device, summed=not aside.mixed)
            most = max(0, torch.cuda.max_memory_allocated() - before - aside.memory)
        torch.cuda.current_stream().wait_stream(stream)
        # what other threads ask of the device, such as pinned memory for the next scene, is no part of the capture
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"), again.run():
            # memory in one piece, of which a run is then cut: pieces of many sizes would take a quarter more
            torch.empty(most, dtype=torch.uint8, device=device)
            results = run()
    return graph.replay, results
