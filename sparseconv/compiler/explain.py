"""What became of a compiled module, in words."""

from __future__ import annotations

import torch

from sparseconv.compiler.program import Recording


def times(n: int) -> str:
    """A number of times in words.

    >>> times(0), times(1), times(3)
    ('0 times', 'once', '3 times')
    """
    return "once" if n == 1 else f"{n} times"


def programs_of(module: torch.nn.Module) -> str | None:
    """The programs that torch.compile made of a module: why each was compiled, its calls, replays, capacities and GPU
    memory, and what runs eagerly and why.

    A program belongs to the module whose parameters it reads; None where there is none.
    """
    from sparseconv.compiler.backend import programs

    mine = {id(p) for p in module.parameters()}
    found = [p for p in programs if any((t := ref()) is not None and id(t) in mine for ref in p.parameters)]
    if not found:
        return None
    lines = []
    for number, program in enumerate(sorted(found, key=lambda p: p.number)):
        kind = "inference" if program.backward is None else "training"
        ran = (
            f"{program.replays} of {program.calls} calls replayed"
            if program.replays
            else f"{program.calls} calls, eager"
        )
        lines.append(f"program {number} ({kind}, {program.name}): {ran}, recorded {times(program.made)}")
        if program.recompiled is not None:
            lines.append(f"  recompiled, since this did not hold: {program.recompiled}")
        for recording in program.recordings.values():
            lines.append(f"  {_size_of(recording)}")
        lines += [f"  {reason}" for reason in program.all_reasons()]
        if program.graph_break is not None:
            lines.append(f"  ends at a graph break: {program.graph_break}")
    return "\n".join(lines)


def _size_of(recording: Recording) -> str:
    rows = ", ".join(f"{n:,}" for n in recording.capacity.values())
    graphs = [region.graph for region in recording.regions.values() if region.graph is not None]
    if not graphs:
        return f"capacity in rows: {rows}"
    from sparseconv.gpu.graphs import memory_of  # loaded where it is used

    return f"capacity in rows: {rows}; CUDA graphs reserve {sum(map(memory_of, graphs)) / 2**20:,.0f} MiB"
