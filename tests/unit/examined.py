"""Runs `weightsync doctor` as a user would, and reads what it prints."""

import json

from weightsync.cli import main


class Report:
    """What the command said of one place."""

    def __init__(self, findings):
        self.findings = findings

    def at(self, level):
        """The findings of a level, as (check, text, mend)."""
        return [(f["check"], f["text"], f["mend"]) for f in self.findings if f["level"] == level]

    @property
    def wrong(self):
        return self.at("wrong")

    @property
    def notes(self):
        return self.at("note")

    def of(self, check):
        """The only finding of a check, as (level, text, mend)."""
        (found,) = [f for f in self.findings if f["check"] == check]
        return found["level"], found["text"], found["mend"]


def examined(capsys, *urls, options=()):
    """The `Report` of this host, and of each URL; the exit status must agree with them."""
    capsys.readouterr()
    status = main(["doctor", "--json", *options, *urls])
    lines = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [line["url"] for line in lines] == [None, *urls]
    reports = [Report(line["findings"]) for line in lines]
    assert status == int(any(report.wrong for report in reports)), lines
    return reports


def engine_of(capsys, url, options=()):
    """The `Report` of one engine."""
    return examined(capsys, url, options=options)[1]
