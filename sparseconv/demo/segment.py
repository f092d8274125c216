"""The main demonstration: a sparse U-Net learns the tissues of a brain."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sparseconv.demo.learn import Course, Scan, Segmenter, brightness_alone, dice, majority, scan, train
from sparseconv.demo.plans import plans_in_use
from sparseconv.demo.report import new_table, plans_table
from sparseconv.demo.tissues import tissue_figure
from sparseconv.demo.volume import CLASSES, load_brain
from sparseconv.tensor import SparseTensor
from sparseconv.viz.figures import save_figure


def segment_brain(
    console: Console,
    device: torch.device,
    output: Path,
    voxel_size: float | None = None,
    steps: int = 120,
    seed: int = 0,
    noise: float = 0.1,
) -> bool:
    """Voxelize, plan, train on the back half, score the front half, draw; False if training was interrupted.

    A KeyboardInterrupt before the first step or after training is raised.

    Args:
        console: where to write.
        device: where to compute.
        output: the picture.
        voxel_size: mm; default 3 on the CPU, 2 elsewhere.
        steps: of training.
        seed: of the first weights, the turns and the noise.
        noise: standard deviation of the noise of the scan, 1 is full brightness.
    """
    begin = time.perf_counter()
    voxel_size = voxel_size or (3.0 if device.type == "cpu" else 2.0)
    brain = load_brain(voxel_size)
    in_front, cut = brain.front()
    counts = torch.stack([~in_front, in_front]).sum(1).tolist()
    threads = f", threads: {torch.get_num_threads()}" if device.type == "cpu" else ""
    console.print(
        f"[bold]MNI152 brain[/] at {voxel_size:g} mm: {len(brain):,} voxels, "
        f"{len(brain) / brain.grid.extent.size:.0%} of the bounding box, on {device}{threads}; loaded in "
        f"{time.perf_counter() - begin:.1f} s"
    )
    console.print(
        f"Input: T1-weighted brightness with {noise:.0%} noise. Classes: "
        f"{', '.join(CLASSES)}.\nTrained on the back half (y < {cut:g} mm, {counts[0]:,} voxels), scored on the front "
        f"half ({counts[1]:,} voxels); left and right are mirror images in this template.\n",
        highlight=False,
    )
    generator = torch.Generator().manual_seed(seed)
    whole = scan(brain, noise, torch.Generator().manual_seed(seed + 1))
    back, front = (Scan(brain.part(m).to(device), whole.brightness[m].to(device)) for m in (~in_front, in_front))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Segmenter(back).to(device)
    uses = plans_in_use(model.net, SparseTensor(back.brain.grid, model.features(back.brightness)), "mm")
    console.print(plans_table(uses))
    widest = max(uses, key=lambda use: use.plan.request(use.c_in, use.c_out).flops)
    weight = torch.empty(widest.plan.num_taps, widest.c_in, widest.c_out, device="meta")
    console.print(f"\nMost expensive layer: {widest.plan.explain(weight[0], weight)}\n", markup=False, highlight=False)

    course = _train_with_bar(console, model, back, noise, steps, generator)
    if course.interrupted:
        if not course.losses:
            raise KeyboardInterrupt
        console.print(
            "Stopped early; scoring and drawing the network as it is. Press Ctrl-C again to quit.", highlight=False
        )
    shares = torch.zeros(len(brain), len(CLASSES))
    for mask, view in ((~in_front, back), (in_front, front)):
        shares[mask] = model.shares(view).cpu()
    scores = {
        "majority class": dice(majority(back, front), front.brain.labels),
        "brightness alone": dice(brightness_alone(back, front), front.brain.labels),
        "sparse U-Net": dice(shares[in_front].argmax(1).to(device), front.brain.labels),
    }
    table = new_table("Dice on the held-out front half", "", *CLASSES, "mean")
    for name, figures in scores.items():
        best = "bold green" if name == "sparse U-Net" else ""
        table.add_row(name, *(f"{v:.3f}" for v in (*figures, sum(figures) / len(figures))), style=best)
    console.print(table)
    pace = f"{1e3 * median(course.seconds):.0f} ms per step (median), " if course.seconds else ""
    console.print(
        f"{len(course.seconds)} steps{' until interrupted' * course.interrupted}, {pace}"
        f"{sum(p.numel() for p in model.parameters()):,} parameters"
    )
    figure = tissue_figure(whole, shares, in_front, cut, scores, noise)
    save_figure(figure, output)
    console.print(f"Picture: [bold]{output}[/]. Total time {time.perf_counter() - begin:.0f} s.")
    return not course.interrupted


def _train_with_bar(
    console: Console, model: Segmenter, back: Scan, noise: float, steps: int, generator: torch.Generator
) -> Course:
    """`train`, with a progress bar that shows the loss and the time of a step."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}, {task.fields[ms]:.0f} ms per step,"),
        TimeRemainingColumn(compact=True),
        TextColumn("left (Ctrl-C stops early)"),
    )
    with Progress(*columns, console=console, transient=not console.is_terminal) as bar:
        task = bar.add_task("", total=steps, loss=float("nan"), ms=float("nan"))
        return train(
            model,
            back.brain,
            noise,
            steps,
            generator,
            lambda course: bar.update(task, advance=1, loss=course.losses[-1], ms=1e3 * course.seconds[-1]),
        )
