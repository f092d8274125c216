# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A U-Net on a brain
# The MNI152 template, which the nilearn package carries, in voxels of 4 mm. The network sees a noisy scan of the back
# half and learns which voxels are grey matter, white matter, or neither. The front half it never sees.

# %%
import torch
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from torch.nn import functional as F

from sparseconv import SparseTensor, nn
from sparseconv.demo.learn import Scan, brightness_alone, dice, scan, turned_grids
from sparseconv.demo.volume import CLASSES, load_brain
from sparseconv.viz import View, new_figure, show, show_slice
from sparseconv.viz.palette import CATEGORIES, GREY, INK

NOISE = 0.1
brain = load_brain(4.0)
in_front, cut = brain.front()
whole = scan(brain, NOISE, torch.Generator().manual_seed(1))
back, front = (Scan(brain.part(mask), whole.brightness[mask]) for mask in (~in_front, in_front))
halves = f"{len(back.brain):,} and {len(front.brain):,}"
print(f"{len(brain):,} voxels; cut at y = {cut:g} mm into {halves}")
show(SparseTensor(brain.grid, brain.intensity[:, None]), unit="mm", title="T1 brightness")

# %%
legend = [Patch(color=colour, label=name) for colour, name in zip(CATEGORIES, CLASSES)]


def draw_labels(axes, grid, labels):
    """One layer of voxels, in the colours of the legend."""
    colours = ListedColormap(CATEGORIES[: len(CLASSES)])
    show_slice(axes, grid, labels.float(), 2, 12.0, unit="mm", cmap=colours, vmin=0, vmax=2)


with new_figure(9, 3.3) as figure:
    left, middle, right = figure.subplots(1, 3)
    show_slice(left, brain.grid, brain.intensity, 2, 12.0, unit="mm", cmap="gray")
    show_slice(
        middle, brain.grid, whole.brightness, 2, 12.0, unit="mm", cmap="gray", vmin=0, vmax=1
    )
    draw_labels(right, brain.grid, brain.labels)
    titles = ("brightness", "with 10% noise: the input", "labels: the target")
    for axes, title in zip((left, middle, right), titles):
        axes.set_title(title)
    figure.legend(handles=legend, loc="outside right center")
View(figure)

# %% [markdown]
# ## The network
# Three levels. Layers ask their grid for plans; the decoder finds the encoder's.

# %%
torch.manual_seed(0)
net = nn.UNet(1, len(CLASSES), channels=(16, 16, 32), block="plain")
print(f"{sum(p.numel() for p in net.parameters()):,} parameters")


def scores(grid, brightness):
    return net(SparseTensor(grid, ((brightness - 0.5) / 0.25)[:, None])).features


# %% [markdown]
# ## Training
# Each step adds new noise and takes the next of eight rotated grids, so that the network learns nothing by heart. A
# rotated grid builds its plans at its first step, and keeps them.

# %%
STEPS = 64
generator = torch.Generator().manual_seed(0)
grids = turned_grids(back.brain.grid, 8, generator)
optimizer = torch.optim.AdamW(net.parameters(), 0.02, weight_decay=0.05)
schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, 0.02, total_steps=STEPS, pct_start=0.2
)
losses = []
for step in range(STEPS):
    view = scan(back.brain, NOISE, generator)
    loss = F.cross_entropy(scores(grids[step % 8], view.brightness), back.brain.labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())

with new_figure(5.5, 2.6) as figure:
    axes = figure.add_subplot()
    axes.plot(losses, color=INK)
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy")
    axes.set_ylim(0)
View(figure)

# %% [markdown]
# ## On the half it never saw
# The Dice score is 1 where prediction and target agree. For comparison, *brightness alone* gives each voxel the most
# frequent class of its brightness.

# %%
net.eval()
with torch.no_grad():
    predicted = scores(front.brain.grid, front.brightness).argmax(1)
labels = front.brain.labels
results = {
    "brightness alone": dice(brightness_alone(back, front), labels),
    "sparse U-Net": dice(predicted, labels),
}
with new_figure(9, 3.3) as figure:
    left, middle, right = figure.subplots(1, 3)
    for axes, title, values in ((left, "target", labels), (middle, "prediction", predicted)):
        draw_labels(axes, front.brain.grid, values)
        axes.set_title(title)
    for n, (name, figures) in enumerate(results.items()):
        colour = (GREY, INK)[n]
        bars = right.bar(
            [c + 0.4 * n for c in range(3)], figures, 0.36, label=name, color=colour
        )
        right.bar_label(bars, fmt="%.2f", fontsize=7)
    right.set_xticks([c + 0.2 for c in range(3)], CLASSES)
    right.set_ylim(0, 1.25)
    right.set_ylabel("Dice on the front half")
    right.legend(loc="upper left")
    figure.legend(handles=legend, loc="outside lower left", ncols=len(CLASSES))
print({name: f"mean Dice {sum(figures) / 3:.2f}" for name, figures in results.items()})
View(figure)

# %% [markdown]
# The right half of the prediction, cut open between the hemispheres:

# %%
right = front.brain.grid.positions()[:, 0] > 0
show(
    front.brain.grid.subset(right),
    predicted[right],
    unit="mm",
    names=CLASSES,
    title="prediction",
)
