"""Bad calls in the suite: the good ones work, and a part of the bad ones is drawn; the command draws more."""

from __future__ import annotations

import importlib.util

import pytest

from tests.fuzz import _bad_calls, calls, dropin_calls

#: calls that need more than one process to work, and only refuse here
REFUSES = ("distributed.",)
NEEDS = {"viz.show": "matplotlib"}


@pytest.mark.parametrize("entry", [*calls.TABLE, *dropin_calls.TABLE], ids=lambda entry: entry.name)
def test_the_good_calls_work(entry):
    if entry.name.startswith(REFUSES) or importlib.util.find_spec(NEEDS.get(entry.name, "torch")) is None:
        pytest.skip("not in one process, or without its library")
    entry.function(**entry.good())


@pytest.mark.parametrize("topic", [calls, dropin_calls], ids=["the library's", "other names"])
def test_bad_calls_are_refused_in_a_sentence(topic):
    assert topic.main(600, seed=1) == []


def test_what_is_wrong_is_said():
    accepted = _bad_calls.call("accepts", lambda x: None, lambda: {"x": 1})
    falls = _bad_calls.call("falls", lambda x: x.nothing, lambda: {"x": 1})
    assert _bad_calls.check(accepted, "x", "list") == "accepts(x=list): accepted"
    assert _bad_calls.check(falls, "x", "list").startswith("falls(x=list): AttributeError")
