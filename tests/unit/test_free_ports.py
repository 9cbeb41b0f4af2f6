"""Ports for servers that are started later."""

from weightsync import testing


def test_no_port_is_given_twice(monkeypatch):
    first = testing.free_port()
    drawn = iter([first, first, testing.free_port(), first])
    choice = testing.secrets.choice
    monkeypatch.setattr(testing.secrets, "choice", lambda candidates: next(drawn, None) or choice(candidates))
    assert testing.free_port() != first
    assert next(drawn, None) is None
