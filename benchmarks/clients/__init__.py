"""Networks that people have, unmodified, under spconv and under this library's names for it: steps on new scans.

    python -m benchmarks.clients --clients DIR --data DIR --library spconv --json FILE
    python -m benchmarks.clients --clients DIR --data DIR --library sparseconv --accelerate --json FILE

``--clients`` is a folder with the clients' own files, which are not part of this project, a folder for each:

| folder | files |
|---|---|
| `pcdet` | OpenPCDet's `spconv_utils.py`, its backbones `spconv_*.py`, and the folder `focal_sparse_conv` |
| `centerpoint` | CenterPoint's `det3d/models/backbones/scn.py` |
| `mmdet3d` | mmdetection3d's `sparse_encoder.py`, `sparse_unet.py`, `sparse_block.py`, `write_spconv2.py` |
| `softgroup` | SoftGroup's `blocks.py`, `softgroup.py` |
| `pointcept` | a checkout of Pointcept |
| none | Pointcept's `spconv_unet_v1m1_base.py` |

Every call is on another of eight rotations of a scan, rows shuffled. Times are medians of CUDA events, in ms; compare
runs of one machine alone. With ``--device cpu`` they are of the wall clock, with all threads.

``--check`` compares results and gradients of the accelerated network with the eager ones'. ``--compiled`` measures
`torch.compile` beside eager. ``--equal FILE`` takes one step in fp64 on a small part of a scene instead. It writes
outputs and gradients to the file, or compares them with those of the file where there is one.
"""
