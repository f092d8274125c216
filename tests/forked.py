"""Programs that start with torch and sparseconv imported: forks of one process, which has imported them once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SERVER = """
import json, os, runpy, sys, traceback
import torch, sparseconv
for line in sys.stdin:
    program, folder, env, out, err = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for number, path in ((1, out), (2, err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.environ.update(env)
            os.chdir(folder)
            sys.argv[:], sys.path[0] = [program], os.path.dirname(program)
            runpy.run_path(program, run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), file=sys.__stdout__, flush=True)
"""


class Forks:
    """A process that runs programs in forks of itself, one after another, with this environment."""

    def __init__(self, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def run(self, program: Path, folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """What a program printed that ran in ``folder``, with more in its environment."""
        out, err = folder / "stdout.txt", folder / "stderr.txt"
        job: list[Any] = [str(program), str(folder), env, str(out), str(err)]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        printed = [path.read_text() for path in (out, err)]
        for path in (out, err):
            os.unlink(path)
        return subprocess.CompletedProcess(str(program), code, *printed)

    def close(self) -> None:
        self._process.communicate()
