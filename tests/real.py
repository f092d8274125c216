"""Real voxels: scans that lie beside a checkout, where they do, and the brain that a package on the index carries."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SCANS = [
    "lidar_ouster_os1_3sweeps_005",
    "lidar_ouster_os2_010",
    "tls_lonestar_005",
    "indoor_rooms_pcl_002",
    "als_ign_lidarhd_100",
    "shape_spot_256",
]
NAMES = [*SCANS, "brain_2mm"]


def missing(name: str) -> str | None:
    """Why this case cannot be loaded here, or None."""
    if name == "brain_2mm":
        return None if find_spec("nilearn") else "nilearn is not installed"
    return None if (DATA / f"{name}.npz").exists() else f"{DATA / name}.npz is not there"


def load(name: str, shuffle: bool = True) -> torch.Tensor:
    """Coords (N, 4) int32 of a case, in a random order of rows."""
    if name == "brain_2mm":
        import nibabel

        spec = find_spec("nilearn")
        assert spec is not None
        assert spec.origin is not None
        file = Path(spec.origin).parent / "datasets/data/mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz"
        volume = np.asarray(nibabel.load(file).dataobj)
        even = tuple(slice(0, n - n % 2) for n in volume.shape)
        coords = np.argwhere(
            volume[even].reshape([v for n in volume[even].shape for v in (n // 2, 2)]).max((1, 3, 5)) > 0
        )
    else:
        coords = np.load(DATA / f"{name}.npz")["coords"]
    coords = torch.from_numpy(coords).int()
    if shuffle:
        coords = coords[torch.randperm(len(coords), generator=torch.Generator().manual_seed(0))]
    return torch.cat([torch.zeros(len(coords), 1, dtype=torch.int32), coords], 1)
