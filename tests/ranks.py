"""Run one function on several ranks of a gloo group, each a process, and bring back what they return or raise."""

from __future__ import annotations

import datetime
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sparseconv.torch_private import VERSION
from tests.cpus import HELD, hold

#: whether torch's fully_shard works over gloo: that of 2.6 raises, those of 2.7 and 2.8 add gradients up, of any layer
SHARDS = VERSION >= (2, 11)
TIMEOUT = datetime.timedelta(seconds=60)
# ranks are forks of one process that has imported what they need, and done nothing else
START = "forkserver"
torch.multiprocessing.get_context(START).set_forkserver_preload(
    ["pytest", "sparseconv.distributed", "sparseconv.nn", "sparseconv.pointwise.operations", "torch._dynamo"]
)

if HELD in os.environ:  # as the process that started this one
    hold(os.environ[HELD])


def _enter(rank: int, world: int, port: int, function: Callable[..., Any], args: tuple, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        results[rank] = function(*args)
    except Exception:
        results[rank] = RuntimeError(traceback.format_exc())
    finally:
        dist.destroy_process_group()


def on_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What each of ``world`` ranks returned. An exception on any of them is raised here."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with torch.multiprocessing.get_context(START).Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.start_processes(
            _enter, (world, port, function, args, results), nprocs=world, start_method=START
        )
        returned = [results[rank] for rank in range(world)]
    for one in returned:
        if isinstance(one, RuntimeError):
            raise one
    return returned
