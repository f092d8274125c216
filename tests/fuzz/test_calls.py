"""Bad calls in the suite: the good ones work, and a part of the bad ones is drawn; the command draws more."""

from __future__ import annotations

import importlib.util

import pytest

from tests.fuzz import calls

#: calls that need more than one process to work, and only refuse here
REFUSES = ("distributed.",)
NEEDS = {"viz.show": "matplotlib"}


@pytest.mark.parametrize("entry", calls.TABLE, ids=lambda entry: entry.name)
def test_the_good_calls_work(entry):
    if entry.name.startswith(REFUSES) or importlib.util.find_spec(NEEDS.get(entry.name, "torch")) is None:
        pytest.skip("not in one process, or without its library")
    entry.function(**entry.good())


def test_bad_calls_are_refused_in_a_sentence():
    assert calls.main(600, seed=1) == []


def test_what_is_wrong_is_said():
    accepted = calls.call("accepts", lambda x: None, lambda: {"x": 1})
    falls = calls.call("falls", lambda x: x.nothing, lambda: {"x": 1})
    assert calls.check(accepted, "x", "list") == "accepts(x=list): accepted"
    assert calls.check(falls, "x", "list").startswith("falls(x=list): AttributeError")
