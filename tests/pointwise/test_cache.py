"""Generated files: atomic, keyed by content, shared by processes and threads."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from sparseconv.pointwise import pointwise_dynamic
from sparseconv.pointwise.kernel import cache
from tests.pointwise.cases import DEVICE, needs_kernels

WORKER = """
import sys, torch, triton
sys.path.insert(0, {tests!r})
from scalar_functions import axpy
from sparseconv.pointwise import pointwise_dynamic
x = torch.arange(8.0, device={device!r}).view(2, 2, 2)
for rank in (1, 2, 3):
    f = pointwise_dynamic(axpy, is_tensor=[True, True, False], dtypes=[None, None, float],
                          promotion_methods=[(0, "DEFAULT")])
    a = x.flatten(0, 3 - rank)
    assert torch.equal(f.instantiate(rank)(a, a, 0.5, out0=torch.empty_like(a)), a * 1.5)
"""


def test_a_file_is_named_by_its_content(tmp_path):
    first = cache.store("f", "x = 1\n", tmp_path)
    assert first.read_text() == "x = 1\n"
    assert cache.store("f", "x = 1\n", tmp_path) == first
    second = cache.store("f", "x = 2\n", tmp_path)
    assert second != first
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([first.name, second.name])
    first.write_text("x = ")  # half a file, as a crash might leave it
    assert cache.store("f", "x = 1\n", tmp_path).read_text() == "x = 1\n"


def test_the_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSECONV_CACHE_DIR", str(tmp_path / "own"))
    assert cache.cache_folder() == tmp_path / "own" / "pointwise"
    monkeypatch.delenv("SPARSECONV_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "sparseconv" / "pointwise"


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    path = cache.store("f", "y = 3\n", blocked / "below")
    assert path.read_text() == "y = 3\n"
    assert cache.load(path, "y = 3\n", {}).y == 3


def test_a_folder_or_a_file_that_others_may_write_is_not_used(tmp_path):
    text, own = "w = 4\n", tmp_path / "own"
    path = cache.store("f", text, own)
    path.chmod(0o666)
    assert cache.store("f", text, own) == path
    assert not path.stat().st_mode & 0o077  # written anew
    victim = tmp_path / "victim.py"
    victim.write_text(text)
    path.unlink()
    path.symlink_to(victim)
    assert cache.store("f", text, own) == path
    assert not path.is_symlink()
    own.chmod(0o777)
    elsewhere = cache.store("f", text, own)
    assert elsewhere.parent != own
    (tmp_path / "link").symlink_to(tmp_path)
    assert cache.store("f", text, tmp_path / "link").parent == elsewhere.parent
    assert elsewhere.read_text() == text


def test_a_process_without_a_home_has_a_private_folder(monkeypatch):
    for name in ("SPARSECONV_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if not hasattr(os, "getuid"):
        pytest.skip("homes of this system are found otherwise")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # nobody's
    with pytest.raises(RuntimeError):
        Path.home()
    path = cache.store("f", "z = 3\n")
    assert path.read_text() == "z = 3\n"
    assert cache.cache_folder() == path.parent


def test_readers_never_meet_half_a_file(tmp_path):
    text = "z = 0\n" * 20000
    stop = threading.Event()
    broken: list[int] = []

    def read():
        while not stop.is_set():
            for path in tmp_path.glob("f_*.py"):
                try:
                    size = path.stat().st_size
                except FileNotFoundError:
                    continue
                if size != len(text):
                    broken.append(size)

    def write():
        for _ in range(20):
            cache.store("f", text, tmp_path).unlink(missing_ok=True)

    reader = threading.Thread(target=read)
    reader.start()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(write) for _ in range(4)]:
            done.result()
    stop.set()
    reader.join()
    assert not broken
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".f_")]


def _make_kernels(start, ranks):
    from tests.pointwise.scalar_functions import axpy

    function = pointwise_dynamic(
        axpy, is_tensor=[True, True, False], dtypes=[None, None, float], promotion_methods=[(0, "DEFAULT")]
    )
    start.wait()
    for rank in ranks:
        overload = function.instantiate(rank)
        name = overload.kernel((None, None, float)).__name__
        (path,) = cache.cache_folder().glob(f"{name}_*.py")
        if path.read_text() != overload.source():
            raise SystemExit(1)


@needs_kernels
def test_eight_processes_make_the_same_files_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSECONV_CACHE_DIR", str(tmp_path))
    import tests.pointwise.scalar_functions  # noqa: F401 - before the fork, which then is fast

    context = multiprocessing.get_context("fork")
    start = context.Barrier(8)
    running = [context.Process(target=_make_kernels, args=(start, (1, 2, 3))) for _ in range(8)]
    for process in running:
        process.start()
    for process in running:
        process.join(500)
        assert process.exitcode == 0
    files = sorted(p.name for p in (tmp_path / "pointwise").iterdir())
    assert len(files) == 3
    assert all(name.startswith("axpy_rank") for name in files)


@pytest.mark.slow
@needs_kernels
def test_eight_processes_run_from_one_cache(tmp_path):
    code = WORKER.format(tests=str(Path(__file__).parent), device=DEVICE)
    environment = {**os.environ, "SPARSECONV_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    for process in running:
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors
    assert len(list((tmp_path / "pointwise").iterdir())) == 3


@needs_kernels
def test_eight_threads_share_one_function(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSECONV_CACHE_DIR", str(tmp_path))
    from tests.pointwise.scalar_functions import axpy

    function = pointwise_dynamic(
        axpy, is_tensor=[True, True, False], dtypes=[None, None, float], promotion_methods=[(0, 1, "DEFAULT")]
    )
    start = threading.Barrier(8)

    def make(_: int):
        start.wait()
        return [function.instantiate(rank).kernel((None, None, float)) for rank in (1, 2, 3, 4)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        made = list(pool.map(make, range(8)))
    assert all(kernels == made[0] for kernels in made)  # one kernel a rank, whoever came first
    assert len(list((tmp_path / "pointwise").iterdir())) == 4
    x = torch.arange(6.0, device=DEVICE)
    if DEVICE == "cuda":
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda k: function(x + k, x, 2.0), range(8)))
        assert all(torch.equal(y, 3 * x + k) for k, y in enumerate(found))
    assert torch.equal(function.kernel_path(x, x, 2.0), 3 * x)


@pytest.mark.parametrize("given", ["jitted", "plain"])
@needs_kernels
def test_jitted_and_plain_functions_serve_alike(given):
    import triton

    from tests.pointwise.scalar_functions import plain_axpy

    jitted = triton.jit(plain_axpy) if given == "jitted" else plain_axpy
    function = pointwise_dynamic(jitted, is_tensor=[True, True, False], promotion_methods=[(0, 1, "DEFAULT")])
    assert function.defaults == (2.0,)
    assert function.extra_arguments == (2,)
    x = torch.arange(3.0, device=DEVICE)
    assert torch.equal(function.kernel_path(x, x), 3 * x)
    assert torch.equal(function.kernel_path(x, x, 1.0), 2 * x)
