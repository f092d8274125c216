"""A whole network: the U-Net of residual blocks, 7.18 M parameters, in this library and in spconv's modules.

fp16, one scene a step. *step*: maps built anew, forward, cross-entropy in fp32, backward. *inference*: maps built anew,
forward. *fixed*: forward on a known geometry; *replay*: the same by a captured CUDA graph. *captured_step* and
*captured_inference*: step and inference by `nn.capture_step` and `nn.capture`, maps built anew inside the graph, the
scene copied in from coordinates and features in every call.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from benchmarks.layers.peers import load_spconv
from sparseconv.bench import cases
from sparseconv.bench.timing import Clock, clock_of

CASES = ("lidar_ouster_os1_3sweeps_005", "tls_lonestar_005", "indoor_rooms_pcl_002", "lidar_ouster_os2_010")
CHANNELS, IN, CLASSES = (32, 64, 128, 256), 4, 20


class OurUNet:
    """`sparseconv.nn.UNet` with its defaults."""

    name = "sparseconv"

    def __init__(self, device: str, dtype: torch.dtype, channels: tuple[int, ...] = CHANNELS) -> None:
        import sparseconv.nn as nn

        self.network = nn.UNet(IN, CLASSES, channels).to(device=device, dtype=dtype)

    def scene(self, coords: torch.Tensor, x: torch.Tensor) -> Any:
        """What the network takes, without any map."""
        import sparseconv as sc

        return sc.SparseTensor(sc.VoxelGrid(coords), x)

    def logits(self, scene: Any) -> torch.Tensor:
        return self.network(scene).features


class SpconvUNet:
    """The same network of spconv's modules."""

    name = "spconv"

    def __init__(self, device: str, dtype: torch.dtype, channels: tuple[int, ...] = CHANNELS) -> None:
        self.library = load_spconv()
        self.network = _spconv_unet(self.library, channels).to(device=device, dtype=dtype)

    def scene(self, coords: torch.Tensor, x: torch.Tensor) -> Any:
        shape = [int(n) for n in coords[:, 1:].amax(0) + 1]
        return self.library.SparseConvTensor(x, coords, shape, 1)

    def logits(self, scene: Any) -> torch.Tensor:
        return self.network(scene)


class SpconvTritonUNet(SpconvUNet):
    """The same network of spconv-triton's modules."""

    name = "spconv-triton"

    def __init__(self, device: str, dtype: torch.dtype, channels: tuple[int, ...] = CHANNELS) -> None:
        self.library = import_module("spconv_triton.pytorch")
        self.network = _spconv_unet(self.library, channels).to(device=device, dtype=dtype)


NETWORKS = {kind.name: kind for kind in (OurUNet, SpconvUNet, SpconvTritonUNet)}


def _spconv_unet(library: Any, channels: tuple[int, ...]) -> torch.nn.Module:
    norm_act = lambda c: (torch.nn.BatchNorm1d(c), torch.nn.ReLU())  # noqa: E731

    def submanifold(c_in: int, c_out: int, level: int) -> torch.nn.Module:
        return library.SubMConv3d(c_in, c_out, 3, bias=False, indice_key=f"level{level}")

    class Block(torch.nn.Module):
        def __init__(self, c_in: int, c_out: int, level: int) -> None:
            super().__init__()
            self.body = library.SparseSequential(
                submanifold(c_in, c_out, level),
                *norm_act(c_out),
                submanifold(c_out, c_out, level),
                torch.nn.BatchNorm1d(c_out),
            )
            self.skip = torch.nn.Linear(c_in, c_out, bias=False) if c_in != c_out else torch.nn.Identity()

        def forward(self, x: Any) -> Any:
            y = self.body(x)
            return y.replace_feature(torch.relu(y.features + self.skip(x.features)))

    class UNet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            steps = list(itertools.pairwise(channels))
            self.stem = library.SparseSequential(submanifold(IN, channels[0], 0), *norm_act(channels[0]))
            self.encoder = torch.nn.ModuleList(Block(c, c, level) for level, c in enumerate(channels))
            self.down = torch.nn.ModuleList(
                library.SparseSequential(
                    library.SparseConv3d(a, b, 2, stride=2, bias=False, indice_key=f"down{level}"), *norm_act(b)
                )
                for level, (a, b) in enumerate(steps)
            )
            self.up = torch.nn.ModuleList(
                library.SparseSequential(
                    library.SparseInverseConv3d(b, a, 2, indice_key=f"down{level}", bias=False), *norm_act(a)
                )
                for level, (a, b) in enumerate(steps)
            )
            self.decoder = torch.nn.ModuleList(Block(2 * a, a, level) for level, (a, _) in enumerate(steps))
            self.head = torch.nn.Linear(channels[0], CLASSES)

        def forward(self, x: Any) -> torch.Tensor:
            x = self.stem(x)
            skips = []
            for level, block in enumerate(self.encoder):
                x = block(x)
                if level < len(self.down):
                    skips.append(x)
                    x = self.down[level](x)
            for level in reversed(range(len(self.up))):
                skip, x = skips.pop(), self.up[level](x)
                x = self.decoder[level](x.replace_feature(torch.cat([skip.features, x.features], 1)))
            return self.head(x.features)

    return UNet()


def measure(
    name: str, case: str, device: str = "cuda", seconds: float = 0.6, channels: tuple[int, ...] = CHANNELS
) -> dict[str, Any]:
    """A row: ms of a step and of inference with maps built, eager and captured, of inference at fixed geometry and
    replayed; parameters; memory of a step: its peak, and all that a captured one holds, with the usual room and with
    room for this very scene, to which the peak of an eager step compares."""
    row: dict[str, Any] = {"network": name, "case": case, "device": device}
    reason = cases.missing(case)
    if reason is not None:
        return row | {"status": "skipped", "reason": reason}
    dtype = torch.float16 if device == "cuda" else torch.float32
    clock = clock_of(device)
    torch.manual_seed(0)
    try:
        net = NETWORKS[name](device, dtype, channels)
    except ImportError as error:
        return row | {"status": "skipped", "reason": f"cannot be imported: {error}"}
    coords = cases.coordinates(case, device)
    x = torch.randn(len(coords), IN, device=device, dtype=dtype)
    labels = torch.randint(0, CLASSES, (len(coords),), device=device)
    parameters = list(net.network.parameters())
    row |= {"voxels": len(coords), "parameters": sum(p.numel() for p in parameters)}

    def step() -> torch.Tensor:
        for p in parameters:
            p.grad = None
        loss = torch.nn.functional.cross_entropy(net.logits(net.scene(coords, x)).float(), labels)
        loss.backward()
        return loss.detach()

    def inference() -> torch.Tensor:
        return net.logits(net.scene(coords, x))

    row["first_s"] = clock.once(step) / 1e3
    fault = _fault(step(), parameters)
    if fault is not None:
        return row | {"status": "wrong", "reason": fault}
    row["step"] = clock.time(step, seconds).as_dict()
    row["memory"] = {"peak_mib": _mib(clock.peak(step))}
    net.network.eval()
    with torch.no_grad():
        row["inference"] = clock.time(inference, seconds).as_dict()
        if name == OurUNet.name:
            scene = net.scene(coords, x)
            wanted = net.logits(scene)
            row["fixed"] = clock.time(lambda: net.logits(scene), seconds).as_dict()
            row["replay"] = _replayed(clock, lambda: net.logits(scene), wanted, seconds)
        else:
            row["fixed"] = row["inference"] | {"by": "maps are part of its inference"}
    if name == OurUNet.name:
        del scene, wanted  # and with it the maps that the scene's grid keeps
        row["captured_inference"] = _captured_inference(clock, net, coords, x, seconds)
        row["captured_step"], held = _captured_step(clock, net, coords, x, labels, seconds)
        row["memory"] |= {"captured_mib": _mib(held), "captured_room_1_mib": None}
        if held is not None:
            row["memory"]["captured_room_1_mib"] = _mib(_held(net, coords, x, labels, room=1))
    return row | {"status": "measured"}


def _fault(loss: torch.Tensor, parameters: list[torch.nn.Parameter]) -> str | None:
    """A network at its start guesses: its loss is near log(classes), and every parameter has a finite gradient."""
    if not 1.5 < float(loss) < 6.0:
        return f"loss {float(loss):.3g} of an untrained network of {CLASSES} classes"
    bad = sum(p.grad is None or not bool(torch.isfinite(p.grad).all()) for p in parameters)
    return f"{bad} of {len(parameters)} parameters have no finite gradient" if bad else None


def _replayed(clock: Clock, call: Callable[[], torch.Tensor], wanted: torch.Tensor, seconds: float) -> dict[str, Any]:
    """The call captured in a CUDA graph and replayed, its result compared."""
    if clock.device != "cuda":
        return {"reason": "graphs are captured on a GPU only"}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            captured = call()
    except RuntimeError as error:
        return {"reason": f"cannot be captured: {str(error).splitlines()[0]}"}
    captured.zero_()
    graph.replay()
    clock.wait()
    if not torch.equal(captured, wanted):
        worst = float((captured.float() - wanted.float()).abs().max())
        return {"reason": f"a replay differs from an eager call by {worst:.2g}"}
    return clock.time(graph.replay, seconds).as_dict()


ON_A_CARD = {"reason": "graphs are captured on a GPU only"}
#: of the loss, so that gradients of a mean over a scene are no subnormal halves, whose rounding hides what is compared
SCALE = 2.0**10


def _captured_inference(
    clock: Clock, net: Any, coords: torch.Tensor, x: torch.Tensor, seconds: float
) -> dict[str, Any]:
    """Inference by `nn.capture`, its result compared with an eager one."""
    import sparseconv.nn as nn

    if clock.device != "cuda":
        return ON_A_CARD
    net.network.eval()
    with torch.no_grad():
        wanted = net.logits(net.scene(coords, x))
    try:
        fast = nn.capture(net.network, net.scene(coords, x))
    except (RuntimeError, ValueError) as error:
        return {"reason": f"cannot be captured: {str(error).splitlines()[0]}"}
    found = clock.time(lambda: fast((coords, x)), seconds).as_dict()
    off = _off([fast((coords, x))], [wanted])
    fast.check()
    return {"reason": f"captured inference is off by {off:.2g}"} if not off < 0.02 else found


def _captured_step(
    clock: Clock,
    net: Any,
    coords: torch.Tensor,
    x: torch.Tensor,
    labels: torch.Tensor,
    seconds: float,
) -> tuple[dict[str, Any], int | None]:
    """A step by `nn.capture_step`, its loss and gradients compared with an eager one's, and the bytes that it holds."""
    import sparseconv.nn as nn

    if clock.device != "cuda":
        return ON_A_CARD, None

    net.network.train()
    parameters = list(net.network.parameters())
    loss = _loss(net.network(net.scene(coords, x)), labels)
    grads = torch.autograd.grad(loss, parameters)
    loss = loss.detach()
    for p in parameters:
        p.grad = None
    before = _reserved()
    try:
        step = nn.capture_step(net.network, _loss, net.scene(coords, x), labels)
    except (RuntimeError, ValueError) as error:
        return {"reason": f"cannot be captured: {str(error).splitlines()[0]}"}, None
    value = step((coords, x), labels)
    held = _reserved() - before
    off = _off([value], [loss]), _off([p.grad for p in parameters], grads)
    found = clock.time(lambda: step((coords, x), labels), seconds).as_dict()
    step.check()
    if not (off[0] < 0.01 and off[1] < 0.1):
        return {"reason": f"a captured step is off by {off[0]:.2g} (loss) and {off[1]:.2g} (gradients)"}, held
    return found, held


def _loss(y: Any, targets: torch.Tensor) -> torch.Tensor:
    return SCALE * torch.nn.functional.cross_entropy(y.features.float(), targets)


def _held(net: Any, coords: torch.Tensor, x: torch.Tensor, labels: torch.Tensor, room: float) -> int:
    """The bytes that a captured step holds after a call."""
    import sparseconv.nn as nn

    for p in net.network.parameters():
        p.grad = None
    before = _reserved()
    step = nn.capture_step(net.network, _loss, net.scene(coords, x), labels, room=room)
    step((coords, x), labels)
    return _reserved() - before


def _off(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """The distance of two lists of tensors over the second's length."""
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, wanted, strict=True))
    return math.sqrt(apart / sum(float(b.double().square().sum()) for b in wanted))


def _reserved() -> int:
    """Bytes of the GPU that torch holds and needs."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _mib(count: int | None) -> float | None:
    return None if count is None else count / 2**20
