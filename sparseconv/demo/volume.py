"""The MNI152 brain template, from the files that the nilearn wheel carries, as voxels with labels."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from sparseconv.geometry import VoxelGrid, voxelize

#: the classes, in the order of their numbers
CLASSES = ("other", "grey", "white")
FILE = "mni_icbm152_{}_tal_nlin_sym_09a_converted.nii.gz"


@dataclass(frozen=True)
class Brain:
    """A brain in voxels: positions in mm (x to the right, y to the front, z up), 0 at the anterior commissure."""

    grid: VoxelGrid
    intensity: torch.Tensor  # (N,) float32 in [0, 1]: the T1-weighted image, the mean over each voxel
    labels: torch.Tensor  # (N,) int64, rows of CLASSES

    def __len__(self) -> int:
        return len(self.grid)

    def part(self, mask: torch.Tensor) -> Brain:
        """The voxels where mask (N,) is true."""
        return Brain(self.grid.subset(mask), self.intensity[mask], self.labels[mask])

    def to(self, device: torch.device | str) -> Brain:
        """This brain on another device."""
        return Brain(self.grid.to(device), self.intensity.to(device), self.labels.to(device))

    def front(self) -> tuple[torch.Tensor, float]:
        """The voxels of the front half, (N,) bool, and the y in mm of the cut between the halves.

        The template is symmetric: its left and right halves mirror each other voxel by voxel. A network trained on one
        half would be tested on what it has seen. Front and back are different anatomy.
        """
        y = self.grid.coords[:, 2]
        cut = int(y.median())
        return y >= cut, self.grid.origin[1] + cut * self.grid.voxel_size[1]


def load_brain(voxel_size: float, folder: Path | None = None) -> Brain:
    """The template (ICBM 152 nonlinear symmetric 2009a, 1 mm) pooled to voxels of ``voxel_size`` mm.

    The input is the T1-weighted image where it is not zero, the mean over each voxel. The template's maps give
    each voxel three shares: grey, white, the rest. The largest share is its label.

    Args:
        voxel_size: edge of a voxel in mm, at least 1.
        folder: where the three files are; default: inside the installed nilearn package. Nothing is downloaded.

    Raises:
        ValueError: a voxel size below the template's own. ImportError: nilearn or nibabel is not installed.
    """
    if not voxel_size >= 1:
        raise ValueError(f"the template has voxels of 1 mm, so voxel_size must be at least 1; got {voxel_size:g}")
    t1, affine = template("t1", folder)
    grey, white = (template(name, folder)[0] for name in ("gm", "wm"))
    sites = np.argwhere(t1)
    here = tuple(sites.T)
    corner = affine[:3, 3] - 0.5  # the lower face of the first voxel, mm
    points = torch.from_numpy(sites + affine[:3, 3]).double()
    origin = tuple(float(c % 1.0) - 1.0 for c in corner)  # faces of large voxels fall on faces of the template's
    grid, rows = voxelize(points, voxel_size, origin=origin)
    values = torch.stack([torch.from_numpy(a[here]).float() / 255 for a in (t1, grey, white)], 1)
    mean = torch.zeros(len(grid), 3).index_add_(0, rows, values) / torch.bincount(rows)[:, None]
    shares = torch.stack([1 - mean[:, 1] - mean[:, 2], mean[:, 1], mean[:, 2]], 1)
    return Brain(grid, mean[:, 0], shares.argmax(1))


def template(name: str, folder: Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """One map of the template, uint8 (197, 233, 189), and its affine from voxels to mm."""
    try:
        import nibabel
    except ImportError:
        raise ImportError("reading the brain template needs nibabel: pip install 'sparseconv[demo]'") from None
    path = (folder or _nilearn_folder()) / FILE.format(name)
    if not path.is_file():
        raise ImportError(
            f"{path} is missing: this release of nilearn lacks the template; pip install 'nilearn>=0.11,<0.15'"
        )
    image = nibabel.Nifti1Image.from_filename(path)
    return np.asarray(image.dataobj), np.asarray(image.affine)


def _nilearn_folder() -> Path:
    spec = find_spec("nilearn")
    if spec is None or spec.origin is None:
        raise ImportError("the brain template comes with nilearn: pip install 'sparseconv[demo]'")
    return Path(spec.origin).parent / "datasets" / "data"
