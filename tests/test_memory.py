"""Memory of large results: who gets it next, and who never may."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch

from sparseconv import memory

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is kept on Linux alone")
MB = 1 << 18  # numbers of fp32


@pytest.fixture(autouse=True)
def _nothing_kept():
    memory.release()
    yield
    memory.release()


def kept() -> int:
    """Bytes that wait for a result."""
    memory._settle(memory.KEPT)
    return sum(map(len, memory._free))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (5,), (7, 3), (2, 3, 5), (33 << 20, 1)])
def test_shape_dtype_and_place(shape, dtype):
    if shape[0] > 100 and dtype.itemsize > 1:
        shape = (shape[0] // dtype.itemsize, 1)
    found = memory.empty(shape, dtype)
    assert (found.shape, found.dtype, found.is_contiguous()) == (shape, dtype, True)
    assert found.data_ptr() % 64 == 0
    found.fill_(1)
    assert bool((found == 1).all())


@LINUX
def test_what_a_result_gave_up_serves_the_next():
    first = memory.empty((40 * MB, 1), torch.float32)
    place = first.data_ptr()
    del first
    assert memory.empty((20 * MB, 2), torch.float32).data_ptr() == place
    assert memory.empty((2, 36 * MB), torch.float16).numel() == 72 * MB  # fits none
    assert memory.empty((36 * MB,), torch.float32).data_ptr() == place  # a tenth less


@LINUX
@pytest.mark.parametrize(
    "hold",
    [
        lambda y: y[5:6],
        lambda y: y.numpy()[5:6],
        lambda y: y.view(2, -1).t()[3:4, 0].detach(),
        lambda y: (y.requires_grad_() ** 2).sum().grad_fn.next_functions[0][0]._saved_self[5:6],
    ],
    ids=["view", "numpy", "detached", "autograd"],
)
def test_memory_that_somebody_holds_serves_nobody_else(hold):
    y = memory.empty((40 * MB,), torch.float32).fill_(1)
    place, held = y.data_ptr(), hold(y)
    del y
    gc.collect()
    assert memory.empty((40 * MB,), torch.float32).zero_().data_ptr() != place
    assert held[0].item() == 1
    del held
    gc.collect()
    assert place in {memory.empty((40 * MB,), torch.float32).data_ptr() for _ in range(2)}


@LINUX
def test_a_third_more_than_asked_stays_for_who_asks_for_it():
    large = memory.empty((60 * MB,), torch.float32)
    del large
    small = memory.empty((40 * MB,), torch.float32)
    assert kept() >= 60 * MB * 4
    assert small.numel() == 40 * MB


@LINUX
def test_no_more_is_kept_than_the_bound(monkeypatch):
    monkeypatch.setattr(memory, "KEPT", 100 << 20)
    several = [memory.empty((size << 20,), torch.int8) for size in (40, 41, 42, 43)]
    last = several[-1].data_ptr()
    while several:
        del several[0]
        assert kept() <= 100 << 20
    assert kept() == 86 << 20  # 42 and 43, in huge pages
    assert memory.empty((43 << 20,), torch.int8).data_ptr() == last
    memory.release()
    assert kept() == 0


@LINUX
def test_who_finds_the_list_taken_waits_for_nobody():
    first = memory.empty((40 << 20,), torch.int8)
    with memory._lock:
        place = first.data_ptr()
        del first
        second = memory.empty((40 << 20,), torch.int8)
        assert second.data_ptr() != place
    assert memory.empty((40 << 20,), torch.int8).data_ptr() == place


@LINUX
def test_where_the_system_has_no_memory_left(monkeypatch):
    with pytest.raises(MemoryError, match="Unable to allocate"):
        memory.empty((1 << 60,), torch.float32)

    def refused(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory.mmap, "mmap", refused)
    assert memory.empty((40 << 20,), torch.int8).data_ptr() % 64 == 0


@LINUX
def test_threads_never_share_a_piece():
    wrong = []

    def work(mark: int) -> None:
        for _ in range(30):
            mine = memory.empty((33 << 20,), torch.int8)
            mine[:: 1 << 20] = mark
            wrong.extend(mine[:: 1 << 20][mine[:: 1 << 20] != mark].tolist())

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@LINUX
def test_a_fork_has_memory_of_its_own():
    y = memory.empty((40 << 20,), torch.int8).fill_(1)
    del y
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        mine = memory.empty((40 << 20,), torch.int8)
        mine[:: 1 << 20] = 2  # few enough for this thread, the one that a fork has
        os.write(write, b"done" if bool((mine[:: 1 << 20] == 2).all()) else b"lost")
        os._exit(0)
    assert os.read(read, 4) == b"done"
    os.waitpid(child, 0)
    assert bool((memory.empty((40 << 20,), torch.int8).fill_(3) == 3).all())


@LINUX
def test_results_alive_at_the_end_of_a_process_are_no_trouble():
    code = "import torch; from sparseconv import memory; y = memory.empty((40 << 20,), torch.int8).fill_(1); z = y[:3]"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.gpu
def test_the_maps_of_an_eager_step_go_with_it():
    import sparseconv as sc
    from tests.streaming.scenes import NETWORKS

    net = NETWORKS["unet"]().cuda()
    coords = torch.unique(torch.randint(0, 60, (40_000, 3), device="cuda"), dim=0)
    coords = torch.nn.functional.pad(coords, (1, 0)).int()

    def step():
        x = sc.SparseTensor(sc.VoxelGrid(coords.clone(), 1), torch.randn(len(coords), 4, device="cuda"))
        net(x).features.square().mean().backward()
        net.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            step()
        assert torch.cuda.memory_allocated() - before < 1 << 20
    finally:
        gc.enable()
