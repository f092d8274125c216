"""Why a test does not pass: the first line of its suite that is found in its name and its error."""

from __future__ import annotations

import re

CARD = "needs a CUDA GPU"
INNER = "reads inner parts of the library"
THEIRS = "fails with the library itself, too"
DIFFERENT = "differs on purpose, as the tables say"
DATA = "reads files that the checkout lacks"
NAMES = "asks for inner names of the library"
KIND = "asks for the kind of an error, or for one where none is"
ONLY = "is for its own library alone"

REASONS: dict[str, tuple[tuple[str, str], ...]] = {
    "minkowski": (
        (r"compiled with(out)? CUDA", CARD),
        (r"a leaf Variable that requires grad", THEIRS),  # a parameter is written to outside of no_grad
        (r"test_kernelmap", THEIRS),  # 16 pairs are expected where its own kernel has 26
        (r"network_speed.py|conv_on_coords.py", THEIRS),  # names that its helper and 0.5 have no more
        (r"backward through the graph a second time", DIFFERENT),
    ),
    "torchsparse": (),
    "flex_gemm": (
        (r"no attribute 'cuda'", DIFFERENT),  # its kernels
        (r"spconv/fwd.*indice_key", THEIRS),  # spconv 2.3.8 takes such a key of submanifold layers alone
        (r"neighbor_cache.*cannot reshape tensor of 0 elements", THEIRS),  # in its own function
    ),
    "spconv": (),
    "spconv_triton": (
        (r"No such file|test_checksums|KeyError: 'g(avg|max)pool'", DATA),
        (r"Skipped", ONLY),
        (r"test_ctor_signatures.*'factory'", DIFFERENT),  # device= and dtype=, too
        (r"test_groups_not|test_subm_even|test_point_vanish|test_select_by_index|autocast|test_add_input", DIFFERENT),
        (r"once_differentiable|maxp3d_fp16|maxp3d_ties|test_indice_dict_population", DIFFERENT),
        (r"test_extended_api_surface|test_test_utils|test_cppcore|test_fx_proxyable", NAMES),
        (r"test_dtype_cast_roundtrip", CARD),
        (r"_asserts|_raises", KIND),
    ),
    "fvdb": (
        (r"_coverage_report|_build_backend|_backend'|last_conv_grid_resource_stats|attribute 'data'", INNER),
        (r"split-cache subprocess|allocation_failure", INNER),
        (r"test_pred_gather", DIFFERENT),
        (r"device_mismatch", CARD),
        (r"'Grid'", DIFFERENT),
    ),
}


def reason(suite: str, name: str, said: str) -> str:
    """The reason of a test that did not pass; empty where there is none."""
    for pattern, why in REASONS[suite]:
        if re.search(pattern, f"{name}: {said}", re.DOTALL):
            return why
    return ""
