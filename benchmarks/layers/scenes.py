"""What the cases of the tables are called."""

from __future__ import annotations

from sparseconv.bench import cases

#: scans, (N, 3) in .npz files in the folder SPARSECONV_BENCH_DATA
SCANS = {
    "lidar_ouster_os1_3sweeps_005": "LiDAR, three sweeps",
    "lidar_ouster_os2_010": "LiDAR, one sweep",
    "tls_lonestar_005": "terrestrial scan",
    "indoor_rooms_pcl_002": "indoor scan",
    "als_ign_lidarhd_100": "aerial scan",
    "shape_spot_256": "mesh surface",
}
TITLES = {**SCANS, cases.BRAIN: "brain, 2 mm"}
RULES = {"shell": "shell {0}³", "uniform": "{0} % of {1}³", "plane": "plane {0}²", "rings": "{0} rings of {1}"}


def title(name: str) -> str:
    """What a case is called in tables and pictures.

    >>> title("uniform_10_64"), title("rings_64_1024"), title("shell_256"), title("brain_mni152_2mm")
    ('10 % of 64³', '64 rings of 1024', 'shell 256³', 'brain, 2 mm')
    """
    made = cases.numbers(name)
    return TITLES.get(name, name) if made is None else RULES[made[0]].format(*made[1])
