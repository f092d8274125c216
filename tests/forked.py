"""Programs in processes of their own that start with torch imported: forks of one process that has imported it once,
which takes longer than most of them."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SERVER = """
import json, os, runpy, sys, traceback, types
import {imports}

def run(env, first, *words):
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    if first == "-c":
        sys.argv[:] = [first, *words[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.argv[:] = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:], sys.path[0] = [first, *words], os.path.dirname(first)
        runpy.run_path(first, run_name="__main__")

def child(env, words):
    if (number := os.fork()) > 0:
        return number
    code = 1
    try:
        for stream, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        run(env, *words)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

for line in sys.stdin:
    words, folder, envs, out, err = json.loads(line)
    codes = [os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in [child(env, words) for env in envs]]
    print(max(codes, key=abs), file=sys.__stdout__, flush=True)
"""


class Forks:
    """A process that runs programs in forks of itself, one after another. It has imported ``imports``."""

    def __init__(self, env: dict[str, str], imports: str = "torch") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER.format(imports=imports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def run(
        self, *words: object, folder: Path, env: dict[str, str], ranks: int = 1
    ) -> subprocess.CompletedProcess[str]:
        """What ``python *words`` prints in ``folder``: a file, or a program behind -c, or a module's name behind -m. Of
        several ranks each has the variables that torchrun sets."""
        envs = [env]
        if ranks > 1:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1]), "WORLD_SIZE": str(ranks)}
            envs = [{**env, **of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        with tempfile.TemporaryDirectory() as kept:
            out, err = Path(kept) / "stdout", Path(kept) / "stderr"
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            job = list(map(str, words)), str(folder), envs, str(out), str(err)
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            return subprocess.CompletedProcess(list(words), code, out.read_text(), err.read_text())

    def close(self) -> None:
        self._process.communicate()


@cache
def _of_torch() -> Forks:
    forks = Forks({**os.environ, "OMP_NUM_THREADS": "1"})
    atexit.register(forks.close)
    return forks


def run(
    *words: object, folder: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What ``python *words`` prints, torch being imported and nothing else of weight; ``env`` is its whole
    environment, save for what is read when torch is imported."""
    env = dict(os.environ if env is None else env)
    if not hasattr(os, "fork"):
        return subprocess.run([sys.executable, *map(str, words)], cwd=folder, env=env, capture_output=True, text=True)
    return _of_torch().run(*words, folder=folder or Path.cwd(), env=env)


def printed(*words: object, folder: Path | None = None, env: dict[str, str] | None = None) -> str:
    """What such a program prints that has to end well."""
    done = run(*words, folder=folder, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
