"""Fuzz tests as commands: ``python -m tests.fuzz TOPIC --count N --seed S``, one module a topic."""
