"""Checkpoints as files: read without running code or believing a header, written whole or not at all."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.checks import check_kind, check_values
from sparseconv.files import check_archive, check_place, most_bytes, written_whole

if TYPE_CHECKING:
    from jaxtyping import Shaped

State = dict[str, torch.Tensor]
#: where training programs put the parameters among other things
CONTAINERS = ("state_dict", "model_state", "model_state_dict", "model", "net", "module")
#: numpy's numbers and arrays among a training program's own values: no parameters, so nothing of numpy is run
NUMPY = (
    "numpy.dtype",
    "numpy.ndarray",
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
    *(f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")),
)
ZIP = b"PK\x03\x04"


class Ignored:
    """What stands for an object whose class is not looked up: it holds nothing and does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Ignored:
        return object.__new__(cls)

    def __setstate__(self, _: Any) -> None:
        pass


def read(path: str | Path, *, ignore_classes: Sequence[str] = ()) -> State:
    """The tensors of a .safetensors, .pth, .pt, .ckpt or .bin file, by key.

    Pickled files are read with ``weights_only``: code in them is never run. A dictionary that holds the parameters
    under one of the usual names (``state_dict``, ``model_state``, ...) is opened; what else a training program keeps
    there, optimizer states and numpy's numbers among it, is left aside.

    Args:
        path: the file.
        ignore_classes: full names of classes, such as ``"argparse.Namespace"``, whose objects are left aside too: they
            are read as empty ones, and neither imported nor run.

    Raises:
        ValueError: a file that is missing, truncated or damaged, holds objects of other classes, unfolds to more than
            200 times its size, or holds no parameters; the message names it.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     torch.save({"epoch": 3, "state_dict": {"conv.weight": torch.ones(2)}}, f"{folder}/net.pth")
    ...     read(f"{folder}/net.pth")
    {'conv.weight': tensor([1., 1.])}
    """
    check_kind("ignore_classes", ignore_classes, (list, tuple, set, frozenset), "pass a list of names")
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no checkpoint at {path}")
    try:
        found = _safetensors().load_file(str(path)) if path.suffix == ".safetensors" else _load(path, ignore_classes)
    except ImportError:
        raise
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError) and _is_pickle(path):
            raise ValueError(f"{path} {_refusal(path, error)}") from error
        reason = "" if isinstance(error, pickle.UnpicklingError) else f": {_first_line(error)}"
        raise ValueError(f"{path} cannot be read, truncated or not a checkpoint{reason}") from error
    state = _parameters(found, str(path))
    _check_tensors(state, path)
    return state


def _load(path: Path, ignore_classes: Iterable[str]) -> Any:
    with path.open("rb") as file:
        if file.read(len(ZIP)) == ZIP:
            check_archive(file, path.stat().st_size)
    with torch.serialization.safe_globals([(Ignored, name) for name in {*NUMPY, *ignore_classes}]):
        return torch.load(path, map_location="cpu", weights_only=True)


def _is_pickle(path: Path) -> bool:
    """Whether a file begins as torch.save and pickle.dump begin it."""
    with path.open("rb") as file:
        return file.read(len(ZIP)).startswith((ZIP, pickle.PROTO))


def _refusal(path: Path, error: Exception) -> str:
    """Why torch did not open a file, which classes are in it, and what to do."""
    try:
        names = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - set(NUMPY)
    except Exception:  # older formats, or a pickle that is torn
        names = set(re.findall(r"GLOBAL ([\w.]+)", str(error)))
    detail = re.search(r"(?:Unpickler error|Unsupported).*", str(error))
    listed = "objects of " + ", ".join(sorted(names)) if names else detail[0] if detail else _first_line(error)
    return (
        "holds more than tensors and plain containers, and is not opened, since loading it could run code: "
        f"{listed[:400]}. Name the classes of objects that are no parameters in ignore_classes (--ignore-class), or "
        "save the state_dict alone, torch.save(model.state_dict(), ...)"
    )


def _check_tensors(state: State, path: Path) -> None:
    """Raise ValueError where a tensor is no plain one on the CPU, or all unfold beyond what the file may ask."""
    for key, tensor in state.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
            kind = f"{'quantized ' * tensor.is_quantized}{tensor.layout} on {tensor.device.type}"
            raise ValueError(f"{path} holds {key!r} as {kind}: parameters are plain tensors")
    total, most = sum(t.numel() * t.element_size() for t in state.values()), most_bytes(path.stat().st_size)
    if total > most:
        raise ValueError(f"{path} unfolds to {total:,} bytes, over the {most:,} that a file of its size may ask for")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("safetensors files need the package safetensors: pip install 'sparseconv[interop]'") from None
    return safetensors.torch


def _parameters(found: Any, name: str) -> State:
    if isinstance(found, Mapping):
        inside = [key for key in CONTAINERS if isinstance(found.get(key), Mapping)]
        if inside and not any(isinstance(value, torch.Tensor) for value in found.values()):
            return _parameters(found[inside[0]], f"{name}[{inside[0]!r}]")
        others = [str(key) for key, value in found.items() if not isinstance(value, torch.Tensor)]
        if found and not others:
            return {str(key): value for key, value in found.items()}
        got = f"a dictionary without tensors ({some(others)})" if len(others) == len(found) else f"also {some(others)}"
    else:
        got = "an object of a class that was ignored" if isinstance(found, Ignored) else type(found).__name__
    raise ValueError(f"{name} should hold parameters by key; got {got}. Parameters are sought under {CONTAINERS}")


def some(items: Sequence[str], most: int = 6) -> str:
    """The first few of many names, and how many there are more."""
    shown = ", ".join(map(str, items[:most]))
    return shown + (f" and {len(items) - most} more" if len(items) > most else "") if items else "none"


def check_entries(state: Mapping[Any, Any]) -> None:
    """Raise TypeError unless all keys are words and all values tensors."""
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise TypeError(f"a checkpoint holds tensors by key, a str; {key!r} is a {type(value).__name__}")


def _stored(key: str, value: torch.Tensor, seen: set[int]) -> torch.Tensor:
    """A tensor as a file holds it: its own numbers and no more, apart from its neighbors'."""
    check_values(f"state[{key!r}]", value)
    own = value.detach().resolve_conj().resolve_neg().contiguous()
    if own.untyped_storage().nbytes() != own.nbytes or own.data_ptr() in seen:
        own = own.clone()
    seen.add(own.data_ptr())
    return own


def write(state: Mapping[str, Shaped[torch.Tensor, " ..."]], path: str | Path) -> None:
    """Write tensors by key, as safetensors where the name ends so, else as torch.save does; whole or not at all.

    Of tensors that share memory, as tied weights do, each is written for itself. No link is followed, and a link at
    ``path`` itself is replaced. Raises ValueError where no file can be written there, or safetensors does not know a
    dtype, and TypeError for no plain tensors.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write({"conv.weight": torch.ones(2)}, Path(folder, "net.pt"))
    ...     read(Path(folder, "net.pt"))
    {'conv.weight': tensor([1., 1.])}
    """
    check_kind("state", state, Mapping, "pass a dict of tensors by key, such as module.state_dict()")
    path = check_place(path)
    check_entries(state)
    seen: set[int] = set()
    stored = {key: _stored(key, value, seen) for key, value in state.items()}
    with written_whole(path) as part:
        if path.suffix == ".safetensors":
            try:
                _safetensors().save_file(stored, str(part))
            except KeyError as error:  # a dtype
                raise ValueError(
                    f"{path}: safetensors {version('safetensors')} does not hold {error.args[0]}: update it, or write "
                    "a .pt file"
                ) from error
        else:
            torch.save(stored, part)
