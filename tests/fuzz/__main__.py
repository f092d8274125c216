"""``python -m tests.fuzz TOPIC --count N --seed S``: runs ``main(count, seed)`` of the module of that name.

``main`` returns one line for each thing that is wrong. The command prints them all, and fails where there are any.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys

import tests.fuzz


def main() -> int:
    topics = sorted(module.name for module in pkgutil.iter_modules(tests.fuzz.__path__) if module.name[0] != "_")
    topics = [name for name in topics if not name.startswith("test_")]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("topic", choices=topics)
    parser.add_argument("--count", type=int, default=300, help="how many cases to draw")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wrong = importlib.import_module(f"tests.fuzz.{given.topic}").main(given.count, given.seed)
    print(*wrong, sep="\n")
    print(f"{given.topic}: {len(wrong)} of {given.count} cases are wrong (seed {given.seed})")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
