"""Parses command lines with their programs' own parsers: ``python tests/document_parsers.py vllm``.

Each line of standard input is a list of words as JSON; the line of standard output that answers it is the error, or
an empty string, as JSON. Programs of this repository run until they have parsed their arguments, and pytest until it
has collected tests. Each is imported once. For an engine, nothing of this repository is needed.
"""

import argparse
import contextlib
import io
import json
import runpy
import sys


def vllm():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return options_of(make_arg_parser(FlexibleArgumentParser()))


def sglang():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return options_of(parser)


def options_of(parser):
    """Return a function that parses arguments; a lone option, whose value is unknown, is only looked up."""

    def read(words):
        if len(words) == 1 and words[0].startswith("--"):
            return "" if words[0] in parser._option_string_actions else f"there is no option {words[0]}"
        return until_read(lambda: parser.parse_args(words))

    return read


def trainer():
    """Return a function that parses ``-m MODULE`` or a file, and its arguments."""
    import pytest

    parse = argparse.ArgumentParser.parse_args

    def once(self, *args, **options):
        parse(self, *args, **options)
        raise SystemExit(0)

    def read(words):
        if words[:2] == ["-m", "pytest"]:
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                code = pytest.main([*words[2:], "--collect-only", "-q", "-p", "no:cacheprovider", "--assert=plain"])
            return f"pytest collects nothing of {words[2:]}: {said.getvalue()[-300:]}" if code else ""
        as_module = words[0] == "-m"
        name, *sys.argv[1:] = words[1:] if as_module else words
        run = runpy.run_module if as_module else runpy.run_path
        argparse.ArgumentParser.parse_args = once
        try:
            return until_read(lambda: run(name, run_name="__main__"))
        finally:
            argparse.ArgumentParser.parse_args = parse

    return read


def until_read(run):
    """Run a program until it has parsed its arguments; returns its error, empty if it accepts them."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            run()
    except SystemExit as end:
        return said.getvalue()[-500:] if end.code else ""
    return ""


def main():
    """Answer line after line."""
    answers, sys.stdout = sys.stdout, sys.stderr  # keep other output apart from the answers
    read = {"vllm": vllm, "sglang": sglang, "trainer": trainer}[sys.argv[1]]()
    for line in sys.stdin:
        try:
            answer = read(json.loads(line))
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
