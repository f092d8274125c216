"""What became of a compiled module, in words."""

from __future__ import annotations

import torch


def programs_of(module: torch.nn.Module) -> str | None:
    """The programs that torch.compile made of a module: calls, replays, capacities, and what runs eagerly and why.

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
        lines.append(f"program {number} ({kind}, {program.name}): {ran}, {program.made} recordings")
        for recording in program.recordings.values():
            rows = ", ".join(f"{n:,}" for n in recording.capacity.values())
            lines.append(f"  capacity in rows: {rows}")
        lines += [f"  {reason}" for reason in program.all_reasons()]
    return "\n".join(lines)
