"""The recipe of `semantic_kitti.py` with Lightning: the same data, network, loss and score in fewer lines of loop.

    pip install lightning
    python examples/semantic_kitti_lightning.py --data DIR --workers 8
    python examples/semantic_kitti_lightning.py --stand-in

A second call continues from ``output/last.ckpt``: Lightning keeps the network, the optimizer, the schedule and the
epoch. It comes to the same bits as an uninterrupted run: order and augmentation are seeded by the epoch's number. A
`Batch` moves itself to the device, since it has ``to``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import lightning
import torch
import typer
from lightning.pytorch.callbacks import ModelCheckpoint
from scans import IGNORE, Batch, Confusion, collate
from semantic_kitti import CLASSES, SPLITS, SemanticKITTI, class_weights
from stand_ins import semantic_kitti as stand_in_set
from torch.utils.data import DataLoader
from training import data_folder

import sparseconv as sc
from sparseconv import nn


class Segmenter(lightning.LightningModule):
    """MinkUNet, the weighted cross-entropy, and the mean IoU over points."""

    def __init__(self, variant: str = "18", width: int = 32, seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        planes = tuple(width * m for m in (1, 2, 4, 8, 8, 4, 3, 3))
        self.net = nn.MinkUNet(4, len(CLASSES), variant=variant, planes=planes, init_channels=width)
        if torch.cuda.is_available():
            sc.accelerate(self.net)
        self.loss_of = torch.nn.CrossEntropyLoss(class_weights(), ignore_index=IGNORE)

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        loss = self.loss_of(self.net(batch.x).features.float(), batch.labels)
        self.log("loss", loss.detach(), prog_bar=True, batch_size=batch.x.grid.batch_size)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.found = Confusion(len(CLASSES))

    def validation_step(self, batch: Batch, index: int) -> None:
        self.found.add(batch.point_labels, self.net(batch.x).features.argmax(1)[batch.point_rows])

    def on_validation_epoch_end(self) -> None:
        self.log("mean_iou", self.found.mean_iou(), prog_bar=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_epoch_start(self) -> None:
        torch.manual_seed(1000 * self.hparams.seed + self.current_epoch)  # the augmentation, where no worker does it


class Scans(lightning.LightningDataModule):
    """Loaders of the set's two splits; Lightning asks for the first anew in each epoch."""

    def __init__(self, folder: Path, batch: int, voxel_size: float, workers: int, seed: int) -> None:
        super().__init__()
        self.sets = {split: SemanticKITTI(folder, split, voxel_size, augment=split == "train") for split in SPLITS}
        self.options = {"batch_size": batch, "collate_fn": collate, "num_workers": workers}
        self.seed = seed

    def train_dataloader(self) -> DataLoader:
        seed, rows = 1000 * self.seed + self.trainer.current_epoch, self.sets["train"]
        # no state that moves, since a run that goes on begins with a loader twice
        chance = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(rows), generator=chance).tolist()
        seeded = partial(_seed_worker, seed)
        return DataLoader(rows, sampler=order, generator=chance, worker_init_fn=seeded, **self.options)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.sets["valid"], **self.options)


def _seed_worker(seed: int, worker: int) -> None:
    torch.manual_seed(1000 * seed + worker)


def train(
    folder: Path,
    output: Path,
    epochs: int,
    batch: int = 2,
    variant: str = "18",
    width: int = 32,
    voxel_size: float = 0.05,
    workers: int = 0,
    seed: int = 0,
) -> lightning.Trainer:
    """Fit, from the last checkpoint where there is one; the trainer, with its metrics."""
    torch.manual_seed(seed)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        precision="16-mixed" if torch.cuda.is_available() else "32-true",
        callbacks=[ModelCheckpoint(output, save_last=True, save_top_k=1, monitor="mean_iou", mode="max")],
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1,
        logger=False,
        enable_progress_bar=False,
        gradient_clip_val=10.0,
    )
    last = output / "last.ckpt"
    scans = Scans(folder, batch, voxel_size, workers, seed)
    trainer.fit(Segmenter(variant, width, seed), scans, ckpt_path=last if last.exists() else None)
    return trainer


def main(
    data: Annotated[Path | None, typer.Option(help="The folder 'dataset' of SemanticKITTI.")] = None,
    stand_in: bool = typer.Option(False, "--stand-in", help="Train on a small generated set of the same layout."),
    epochs: int = 15,
    batch: int = 2,
    workers: int = 0,
    output: Path = Path("runs/lightning"),
    seed: int = 0,
) -> None:
    """Segment SemanticKITTI with MinkUNet and Lightning; run it again to continue."""
    with data_folder(data, stand_in, stand_in_set.write) as folder:
        size = ("14", 8, 0.2) if stand_in else ("18", 32, 0.05)
        trainer = train(folder, output, epochs, batch, *size, workers, seed)
    print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    typer.run(main)
