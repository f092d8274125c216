"""What all recipes share: the data's folder, epochs that may be interrupted, mixed precision, a picture of the curve.

All chance comes from torch's generators, those of the loader's workers too. So a checkpoint holds their state and
nothing else of chance, and an interrupted run goes on to the same bits.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import typer

#: of the curves: blue and vermilion of Okabe and Ito's set, as in the library's own pictures
COLORS = ("#0072B2", "#D55E00")


@contextlib.contextmanager
def data_folder(data: Path | None, stand_in: bool, write: Callable[[Path], None]) -> Iterator[Path]:
    """The folder of the real data, or a temporary one with a stand-in that ``write`` made of the same layout."""
    if stand_in == (data is not None):
        raise typer.BadParameter("give --data DIR, or --stand-in for a small generated set of the same layout")
    if data is not None:
        yield data
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        yield Path(folder)


def begin(seed: int = 0) -> torch.device:
    """Seed torch, before the network is made; the device to train on."""
    torch.manual_seed(seed)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Run:
    """Training that continues where it stopped.

    Everything that decides the next bit is in ``output/name.pt``, written after each epoch: the network, the optimizer,
    the schedule, the loss scale, torch's random state, and the history. A new `Run` on the same folder reads it.

    Args:
        output, name: the folder and the name of the checkpoint, the picture and the summary.
        net, optimizer: as usual; the network is on its device.
        schedule: is stepped after every batch.
        clip: the longest gradient, as a norm over all parameters.
    """

    def __init__(
        self,
        output: Path,
        name: str,
        net: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
        clip: float = 10.0,
    ) -> None:
        self.output, self.name, self.clip = output, name, clip
        self.net, self.optimizer, self.schedule = net, optimizer, schedule
        self.device = next(net.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.device.type == "cuda")
        self.history: list[dict[str, float]] = []
        self.losses: list[float] = []
        self.planned: int | None = None
        self._batch_losses: list[torch.Tensor] = []
        self._started = time.process_time()
        if self.checkpoint.exists():
            self._restore(torch.load(self.checkpoint, map_location="cpu", weights_only=True))

    @property
    def checkpoint(self) -> Path:
        return self.output / f"{self.name}.pt"

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of ``count``, from 1."""
        if self.planned not in (None, count):
            raise ValueError(
                f"{self.checkpoint} is of a run of {self.planned} epochs, whose schedule ends there; got {count}: give "
                "--epochs as before, or another --output"
            )
        self.planned = count
        while len(self.history) < count:
            self._started = time.process_time()
            yield len(self.history) + 1

    def autocast(self) -> torch.autocast:
        """fp16 on a GPU; nothing on a CPU."""
        return torch.autocast(self.device.type, torch.float16, enabled=self.device.type == "cuda")

    def step(self, loss: torch.Tensor) -> None:
        """Gradients of the loss, one step of the optimizer and of the schedule. Waits for no GPU."""
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.schedule is not None:
            self.schedule.step()
        self._batch_losses.append(loss.detach())

    def finish_epoch(self, **scores: float) -> None:
        """Keep the scores, write the checkpoint, say where training is."""
        losses = torch.stack(self._batch_losses).tolist()
        self._batch_losses = []
        self.losses += losses
        spent = time.process_time() - self._started
        self.history.append({"loss": sum(losses) / len(losses), **scores, "cpu_seconds": spent})
        self.output.mkdir(parents=True, exist_ok=True)
        half = self.checkpoint.with_suffix(".half")  # renamed when it is whole, so that no interruption spoils it
        torch.save(self._state(), half)
        half.replace(self.checkpoint)
        said = "  ".join(f"{key} {value:.4g}" for key, value in self.history[-1].items())
        print(f"{self.name}: epoch {len(self.history)}  {said}", flush=True)

    def _state(self) -> dict:
        chance = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            chance["cuda"] = torch.cuda.get_rng_state(self.device)
        parts = {"net": self.net, "optimizer": self.optimizer, "schedule": self.schedule, "scaler": self.scaler}
        states = {name: part.state_dict() for name, part in parts.items() if part is not None}
        return {**states, "chance": chance, "history": self.history, "losses": self.losses, "planned": self.planned}

    def _restore(self, state: dict) -> None:
        for name in ("net", "optimizer", "schedule", "scaler"):
            if name in state:
                getattr(self, name).load_state_dict(state[name])
        self.history, self.losses, self.planned = state["history"], state["losses"], state["planned"]
        torch.set_rng_state(state["chance"]["cpu"])
        if "cuda" in state["chance"] and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["chance"]["cuda"], self.device)

    def summary(self, score: str, chance: float, label: str = "", **more: float) -> dict:
        """Write ``output/name.png`` and ``output/name.json``; ``chance`` is that of guessing, ``label`` their axis."""
        found = {
            "recipe": self.name,
            "epochs": len(self.history),
            "cpu_seconds": round(sum(epoch["cpu_seconds"] for epoch in self.history), 1),
            "threads": torch.get_num_threads(),
            "score": score,
            "first": round(self.history[0][score], 4),
            "last": round(self.history[-1][score], 4),
            "chance": round(chance, 4),
            **more,
        }
        (self.output / f"{self.name}.json").write_text(json.dumps(found, indent=2) + "\n")
        self._draw(score, chance, label or score.replace("_", " ").replace("iou", "IoU"))
        return found

    def _draw(self, score: str, chance: float, label: str) -> None:
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt

        figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
        for axes in (left, right):
            axes.set_prop_cycle(color=COLORS)
        left.plot(range(1, len(self.losses) + 1), self.losses, lw=1)
        left.set(xlabel="step", ylabel="training loss", title=self.name.replace("_", " "))
        right.plot(range(1, len(self.history) + 1), [epoch[score] for epoch in self.history], "o-", label="held out")
        right.axhline(chance, color="gray", ls=":", label="guessing")
        right.set(xlabel="epoch", ylabel=label)
        right.margins(y=0.1)  # guessing is seen at an edge, too
        right.xaxis.get_major_locator().set_params(integer=True)
        right.legend()
        figure.savefig(self.output / f"{self.name}.png", dpi=90)
        plt.close(figure)
