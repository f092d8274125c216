"""Kernels compiled by processes beside this one: for Hopper, without a card, apart from the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are started on Linux alone")

#: how every script below begins: Triton compiles for Hopper, and tells what it compiles and what it finds
BEGIN = """
import json, os, signal, sys, time
from contextlib import nullcontext
import torch
from triton import knobs
from sparseconv.gpu.compiling import pool as pools, server
from sparseconv.gpu.compiling.job import Target

server.aim_at(Target("cuda", 90, 32))
torch.cuda.device, torch.cuda.current_device = (lambda _: nullcontext()), (lambda: 0)
from sparseconv.geometry.gpu.pairs.pair_lists import CONFINE, REVERSE
from sparseconv.geometry.gpu.tiles.kernels import RANKS
from sparseconv.gpu import launcher
launcher.builds_launchers = lambda: False
DEVICE = torch.device("cuda", 0)
told = []
knobs.compilation.listener = lambda src, cache_hit, **_: told.append(cache_hit)
pool = launcher.compilers_for(0)
ASKED = [(REVERSE, (1024,)), (RANKS, (32, 64, 1024)), (CONFINE, (32,))]

def ahead():
    for kernel, constants in ASKED:
        kernel.ahead(DEVICE, constants)

def meet():
    for kernel, constants in ASKED:
        kernel.compile(constants)

def say(**facts):
    print(json.dumps({"hits": told, "compiled": pool.compiled, "failed": list(pool.failed.values()), **facts}))
"""


def run(script: str, cache: Path, workers: int = 2, **environment: str) -> dict:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(cache), "SPARSECONV_COMPILE_WORKERS": str(workers), **environment}
    command = [sys.executable, "-c", BEGIN + script]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> tuple[Path, dict]:
    """A cache that a process filled ahead, and what that process said."""
    cache = tmp_path_factory.mktemp("cache")
    return cache, run("ahead(); done = pool.wait(100); meet(); say(done=done)", cache)


def test_what_is_compiled_ahead_is_what_a_launch_asks_for(filled) -> None:
    _, said = filled
    assert said == {"hits": [True] * 3, "compiled": 3, "failed": [], "done": True}


def test_a_second_process_starts_no_other(filled) -> None:
    said = run("ahead(); meet(); say(started=pool._starts, known=len(pool.done))", filled[0])
    assert said == {"hits": [True] * 3, "compiled": 0, "failed": [], "started": 0, "known": 3}


@pytest.mark.slow
def test_what_is_asked_for_after_the_cache_moved_lies_in_its_new_place(filled, tmp_path: Path) -> None:
    moved = f"knobs.cache.dir = {str(tmp_path)!r}; other = launcher.compilers_for(0)"
    said = run(
        f"ahead(); {moved}; ahead(); done = other.wait(100); meet(); say(done=done, more=other.compiled)", filled[0]
    )
    assert said == {"hits": [True] * 3, "compiled": 0, "failed": [], "done": True, "more": 3}
    assert len(list(tmp_path.rglob("*.cubin"))) == 3


def test_a_launch_takes_back_what_nobody_began(tmp_path: Path) -> None:
    """The server is not ready yet: nothing waits for it."""
    said = run("ahead(); meet(); say(left=len(pool._queue))", tmp_path)
    assert said["left"] == 0
    assert said["failed"] == []
    assert len(said["hits"]) == 3


def test_without_processes_threads_compile(tmp_path: Path) -> None:
    script = "ahead(); launcher.await_compilers(); n = len(told); meet(); say(before=n, started=pool._starts)"
    assert run(script, tmp_path, workers=0) == {
        "hits": [False] * 3, "compiled": 0, "failed": [], "before": 3, "started": 0,
    }  # fmt: skip


@pytest.mark.slow
def test_a_server_that_is_killed_and_one_that_cannot_start_cost_no_kernel(tmp_path: Path) -> None:
    script = """
ahead()
os.kill(pool._server.process.pid, signal.SIGKILL)
meet()
pool._server and pool._server.process.wait()
sys.executable = "/nowhere/python"
other = pools.Pool(Target("cuda", 90, 32), 2)
job = launcher.job_of(RANKS.function, RANKS.types, (8, 64, 1024), RANKS._all_options, other.target)
say(taken=other.submit(job), usable=other.is_usable)
"""
    said = run(script, tmp_path)
    assert (len(said["hits"]), said["taken"], said["usable"]) == (3, False, False)


def test_a_job_that_fails_is_told_to_whoever_compiles_it(tmp_path: Path) -> None:
    script = """
RANKS.ahead(DEVICE, ("no number", 64, 1024))
pool.wait(100)
RANKS.ahead(DEVICE, ("no number", 64, 1024))
launcher.await_compilers()
try:
    RANKS.compile(("no number", 64, 1024))
except Exception as error:
    say(error=type(error).__name__)
"""
    said = run(script, tmp_path)
    assert said["error"] == "CompilationError"
    assert len(said["failed"]) == 1
    assert "CompilationError" in said["failed"][0]


@pytest.mark.slow
def test_a_forked_process_compiles_for_itself(tmp_path: Path) -> None:
    script = """
ahead()
child = os.fork()
if not child:
    meet()
    os._exit(0 if not pool.is_usable and len(told) == 3 else 1)
status = os.waitpid(child, 0)[1]
meet()
say(status=status)
"""
    assert run(script, tmp_path)["status"] == 0


@pytest.mark.slow
def test_no_process_outlives_the_one_that_started_it(tmp_path: Path) -> None:
    script = """
ahead()
pool.wait(100)
children = open(f"/proc/{pool._server.process.pid}/task/{pool._server.process.pid}/children").read().split()
say(server=pool._server.process.pid, workers=children)
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(tmp_path), "SPARSECONV_COMPILE_WORKERS": "2"}
    done = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, env=variables, timeout=200)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["workers"]
    assert not [pid for pid in (said["server"], *said["workers"]) if _runs_on(int(pid))]


def _runs_on(pid: int, seconds: float = 10) -> bool:
    import time

    for _ in range(int(seconds * 10)):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state in "ZX":
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
def test_ranks_of_one_machine_compile_each_kernel_once(tmp_path: Path) -> None:
    script = """
ahead()
pool.wait(100)
say(done=len(pool.done))
"""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(tmp_path), "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", BEGIN + script], stdout=subprocess.PIPE, text=True, env=variables)
        for _ in range(2)
    ]
    said = [json.loads(rank.communicate(timeout=200)[0].splitlines()[-1]) for rank in ranks]
    assert [rank["done"] for rank in said] == [3, 3]
    assert sum(rank["compiled"] for rank in said) == 3


@pytest.mark.parametrize(
    ("cores", "environment", "expected"),
    [
        (16, {}, 16),
        (16, {"LOCAL_WORLD_SIZE": "8"}, 2),
        (4, {"LOCAL_WORLD_SIZE": "8"}, 1),
        (1, {}, 0),
        (64, {}, 32),
        (1, {"SPARSECONV_COMPILE_WORKERS": "3"}, 3),
        (16, {"SPARSECONV_COMPILE_WORKERS": "0"}, 0),
        (16, {"SPARSECONV_COMPILE_WORKERS": "many", "LOCAL_WORLD_SIZE": "?"}, 16),
    ],
)
def test_workers_share_the_cores_of_a_machine(cores, environment, expected, monkeypatch) -> None:
    from sparseconv.gpu.compiling.starting import worker_count

    for name in ("LOCAL_WORLD_SIZE", "SPARSECONV_COMPILE_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert worker_count.__wrapped__() == expected


def test_nothing_is_started_where_the_cache_cannot_be_written(monkeypatch, tmp_path: Path) -> None:
    from sparseconv.gpu.compiling import starting as pool

    monkeypatch.setattr(pool, "cache_dir", lambda: str(tmp_path / "not" / "there"))
    pool._can_write.cache_clear()
    assert pool.can_start()
    pool._can_write.cache_clear()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert not pool.can_start()
    monkeypatch.setattr(pool, "cache_dir", lambda: "")
    pool._can_write.cache_clear()
    assert not pool.can_start()
    pool._can_write.cache_clear()


@pytest.mark.parametrize(
    ("card", "marked", "environment", "starts"),
    [
        (True, False, {}, True),
        (False, False, {}, False),
        (True, True, {}, False),
        (True, False, {"SPARSECONV_COMPILE_WORKERS": "0"}, False),
        (True, False, {"CUDA_VISIBLE_DEVICES": ""}, False),
        (True, False, {"TRITON_INTERPRET": "1"}, False),
    ],
)
def test_the_server_starts_with_the_first_layer_where_kernels_will_be_compiled(
    card, marked, environment, starts, tmp_path: Path
) -> None:
    from sparseconv.gpu.compiling.job import MARKS
    from sparseconv.gpu.compiling.starting import folder_of

    cache, driver = tmp_path / "cache", tmp_path / "driver"
    (cache / folder_of(MARKS) if marked else cache).mkdir(parents=True)
    if card:
        driver.touch()
    script = f"""
import json, sparseconv as sc
from sparseconv.gpu.compiling import starting
starting.DRIVER = ({str(driver)!r},)
for _ in range(2):
    sc.nn.SubmanifoldConv(4, 4, 3)
early = starting._Early.server
taken = starting.started() if early else None
print(json.dumps({{"early": early is not None, "taken": taken is early, "left": starting._Early.server is not None}}))
"""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(cache), "SPARSECONV_COMPILE_WORKERS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=variables, timeout=100)
    assert json.loads(done.stdout.splitlines()[-1]) == {"early": starts, "taken": True, "left": False}, done.stderr


@pytest.mark.slow
def test_a_server_that_was_started_early_compiles(tmp_path: Path) -> None:
    script = """
from sparseconv.gpu.compiling import starting
starting.DRIVER = (os.devnull,)
starting.start_early()
early = starting._Early.server.process.pid
ahead()
done = pool.wait(100)
say(same=pool._server.process.pid == early, done=done)
"""
    said = run(script, tmp_path)
    assert (said["same"], said["done"], said["compiled"], said["failed"]) == (True, True, 3, [])
