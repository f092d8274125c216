"""Other libraries' own tests, unmodified, under this library's names for them, on the CPU.

    python -m benchmarks.suites --checkouts DIR --json FILE
    python -m benchmarks.suites --checkouts DIR --suite minkowski

``--checkouts`` is a folder with the libraries' repositories, which are no part of this project, a folder for each:

| folder | repository | what is run |
|---|---|---|
| `minkowski` | MinkowskiEngine | `tests/python` |
| `torchsparse` | torchsparse | `tests/test.py` |
| `flex_gemm` | FlexGEMM | `tests`, but for scripts that time other libraries |
| `spconv` | spconv | `test/test_conv.py` |
| `spconv_triton` | spconv-triton | `tests`, with ``SPCONV_TEST_IMPL=spconv`` |
| `fvdb` | fvdb-core | `tests/unit/test_conv_semantics*.py` |

Where a test asks for a CUDA GPU, the CPU answers as one. Loops that look for leaks go round three times, and
FlexGEMM's scenes are cut. It needs ``parameterized``, and spconv's wheel for numbers that a checkout lacks.

Each test that does not pass has a reason in `reasons`, and the command fails where one has none.
"""
