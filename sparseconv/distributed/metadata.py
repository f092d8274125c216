"""The index of a folder that torch.distributed.checkpoint wrote, read without running what it holds."""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from sparseconv.distributed.agreement import why
from sparseconv.files import check_archive

#: what such an index is made of: records without code of their own
CLASSES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: str(name),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(dcp, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
}
#: operations of a pickle that number an object; the number is bounded by the pickle's length
MEMO = {"PUT", "BINPUT", "LONG_BINPUT"}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in CLASSES:
            return CLASSES[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return PurePosixPath
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of an index and is not run")


def read_metadata(folder: Path) -> dcp.Metadata:
    """The index ``.metadata`` of a folder, made of plain records alone.

    Raises:
        ValueError: no index, a torn one, or one that asks for anything but the records of such an index.
    """
    path = folder / ".metadata"
    if not path.is_file():
        raise ValueError(f"there is no index .metadata in {folder}: nothing was saved there, or saving was cut short")
    data = path.read_bytes()
    try:
        for operation, argument, _ in pickletools.genops(data):
            if operation.name in MEMO and int(str(argument)) > len(data):
                raise ValueError(f"it numbers an object {argument}, and has {len(data):,} bytes")
        found = _Reader(io.BytesIO(data)).load()
    except Exception as error:  # a torn pickle ends in any kind of error
        raise ValueError(f"the index .metadata is torn or no index: {error or type(error).__name__}") from error
    if not isinstance(found, dcp.Metadata):
        raise ValueError(f"the index .metadata holds a {type(found).__name__}")
    return found


def read_tensor(folder: Path, index: dcp.Metadata, name: str) -> torch.Tensor | None:
    """A tensor that was saved whole under a name, or None where there is none of it.

    Raises:
        ValueError: bytes that lie outside of the folder or of their file, are torn, or are another tensor than the
            index says.
    """
    entry = index.state_dict_metadata.get(name)
    if entry is None:
        return None
    places = [info for key, info in (index.storage_data or {}).items() if key.fqn == name]
    if not isinstance(entry, dcp.TensorStorageMetadata) or len(places) != 1 or len(entry.chunks) != 1:
        raise ValueError(f"{name} was not saved as one tensor")
    (place,) = places
    if PurePosixPath(place.relative_path).name != place.relative_path or getattr(place, "transform_descriptors", None):
        raise ValueError(f"{name} lies in {place.relative_path!r}, which is no file of a scene")
    path = folder / place.relative_path
    if not path.is_file():
        raise ValueError(f"{name} is missing: there is no file {place.relative_path}")
    size = path.stat().st_size
    if not 0 <= place.offset <= place.offset + place.length <= size:
        raise ValueError(
            f"{place.relative_path} is torn: {name} ends at byte {place.offset + place.length:,} of {size:,}"
        )
    with path.open("rb") as file:
        file.seek(place.offset)
        data = io.BytesIO(file.read(place.length))
    try:
        check_archive(data, place.length)
        data.seek(0)
        found = torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{name} in {place.relative_path} is torn: {why(error)}") from error
    said = (entry.properties.dtype, tuple(entry.size))
    if (
        not isinstance(found, torch.Tensor)
        or found.layout != torch.strided
        or (found.dtype, tuple(found.shape)) != said
    ):
        raise ValueError(
            f"{name} in {place.relative_path} is no {said[0]} tensor of shape {said[1]}, as the index says"
        )
    if found.numel() * found.element_size() > place.length:
        raise ValueError(f"{name} {tuple(found.shape)} does not fit into the {place.length:,} bytes that were saved")
    return found
