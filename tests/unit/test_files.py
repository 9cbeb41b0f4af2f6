"""Versions as files: what is written, what a reader holds after it, and what is removed."""

import os
import random
import subprocess
import sys

import pytest
import torch

from tests.unit.written import files, same, stepped, take, weights
from weightsync.errors import AuthenticationFailed, SourceError, TransferFailed, UnsupportedOption
from weightsync.files import Folder
from weightsync.files.held import HeldVersion
from weightsync.files.places import open_place
from weightsync.files.shelf import numbers


@pytest.fixture
def held(made):
    return made(HeldVersion())


# ---- what is written -------------------------------------------------------------------------------------------------


def test_a_full_version_and_deltas_are_restored_bit_by_bit(tmp_path, held):
    folder = Folder(tmp_path)
    first, second = weights(), stepped(weights())
    one, two = folder.write(first), folder.write(second, version="two")
    three = folder.write(second)
    assert (one.version, one.number, one.full) == ("1", 1, True)
    assert (two.version, two.number, two.full) == ("two", 2, False)
    assert two.nbytes < 15_000 * 3.3 + 100 < one.nbytes / 10
    assert (three.nbytes, three.full) == (0, False)
    for number, expected in ((1, first), (2, second), (3, second)):
        take(held, tmp_path, number)
        assert held.version.manifest.label == ("two" if number == 2 else str(number))
        assert same(held.weights(), expected)


def test_modules_iterators_and_checkpoint_folders_can_be_written(tmp_path, held, trained, model_folder):
    folder = Folder(tmp_path)
    expected = {name: tensor.detach() for name, tensor in trained.named_parameters()}
    for number, model in enumerate((trained, iter(expected.items()), model_folder("llama", 1)), 1):
        assert folder.write(model).full == (number == 1)
        take(held, tmp_path, number)
        assert same({name: held.weights()[name] for name in expected}, expected)


def test_every_so_many_versions_one_is_complete(tmp_path):
    folder = Folder(tmp_path, full_every=3)
    model = weights()
    assert [folder.write(model).full for _ in range(7)] == [True, False, False, True, False, False, True]


def test_a_version_is_complete_after_deltas_that_take_as_much(tmp_path):
    folder = Folder(tmp_path)
    one, other = ({"a": torch.randn(1000), "b": torch.ones(3)} for _ in range(2))
    assert [folder.write(model).full for model in (one, other, one, other)] == [True, False, False, True]


@pytest.mark.parametrize(
    "other",
    [{"a": torch.ones(4)}, {"b": torch.ones(3)}, {"a": torch.ones(3).half()}, {"a": torch.ones(3), "b": torch.ones(3)}],
)
def test_other_tensors_are_refused_once_and_then_written_in_full(tmp_path, held, other):
    folder = Folder(tmp_path)
    folder.write({"a": torch.ones(3)})
    with pytest.raises(SourceError, match=r"the version before had .* write again, in full"):
        folder.write(other)
    assert numbers(os.listdir(tmp_path)) == [1]
    assert len(files(tmp_path)) == 2
    done = folder.write(other)
    assert (done.number, done.full) == (3, True)
    take(held, tmp_path, 3)
    assert same(held.weights(), other)


def test_a_model_of_nothing_is_refused(tmp_path):
    with pytest.raises(SourceError, match="holds no tensors"):
        Folder(tmp_path).write({})
    assert files(tmp_path) == []


def test_an_iterator_may_have_another_order_each_time(tmp_path, held):
    folder = Folder(tmp_path)
    model = list(weights().items())
    for number, changed in ((1, weights()), (2, stepped(weights())), (3, weights())):
        random.Random(number).shuffle(model)
        folder.write((name, changed[name]) for name, _ in model)
        take(held, tmp_path, number)
        assert same(held.weights(), changed)


@pytest.mark.parametrize("pairs", [[], [("a", torch.ones(1))] * 2, [1], [("a", torch.ones(1)), ("b", None)]])
def test_an_iterator_that_cannot_be_read_leaves_nothing(tmp_path, pairs):
    folder = Folder(tmp_path)
    with pytest.raises(SourceError):
        folder.write(iter(pairs))
    assert files(tmp_path) == []


def test_an_error_of_the_model_is_its_own_and_leaves_nothing(tmp_path):
    def gathered():
        yield "a", torch.ones(1)
        raise RuntimeError("NCCL")

    folder = Folder(tmp_path)
    with pytest.raises(RuntimeError, match="NCCL"):
        folder.write(gathered())
    assert files(tmp_path) == []


def test_what_cannot_be_written_says_so_and_the_next_is_complete(tmp_path):
    where = tmp_path / "there"
    folder = Folder(where)
    folder.write(weights())
    where.rename(tmp_path / "away")
    where.write_text("a file")
    with pytest.raises(TransferFailed, match=r"there: 000000000002-.*cannot be written.*\[write\]"):
        folder.write(weights())
    where.unlink()
    (tmp_path / "away").rename(where)
    assert folder.write(weights()).full


def test_options_are_checked(tmp_path, own_homes):
    with pytest.raises(AuthenticationFailed, match="versions are signed, and the key is missing"):
        Folder(tmp_path)
    with pytest.raises(UnsupportedOption, match="full_every 0"):
        Folder(tmp_path, token="key", full_every=0)
    with pytest.raises(UnsupportedOption, match="nowhere://x: fsspec cannot open it"):
        Folder("nowhere://x", token="key")
    with pytest.raises(UnsupportedOption, match="not a valid label"):
        Folder(tmp_path, token="key").write(weights(), version="")


def test_a_store_of_fsspec_holds_the_same(held):
    folder = Folder("memory://run/weights", full_every=2)
    models = [weights()]
    for _ in range(5):
        folder.write(models[-1])
        models.append(stepped(models[-1], seed=len(models)))
    there = numbers(open_place("memory://run/weights").names())
    assert there == [3, 4, 5]
    for number in (4, 5):
        take(held, "memory://run/weights", number)
        assert same(held.weights(), models[number - 1])
    assert Folder("memory://run/weights").write(weights()).number == 6


# ---- what is removed -------------------------------------------------------------------------------------------------


def test_what_the_newest_two_versions_need_stays(tmp_path, held):
    folder = Folder(tmp_path, full_every=4)
    expected = {4: [1, 2, 3, 4], 5: [1, 2, 3, 4, 5], 6: [5, 6], 8: [5, 6, 7, 8], 9: [5, 6, 7, 8, 9], 10: [9, 10]}
    for number in range(1, 11):
        folder.write(stepped(weights(), number))
        there = numbers(os.listdir(tmp_path))
        assert there == expected.get(number, there)
        assert len(files(tmp_path)) == 2 * len(there)
    for number in there:
        take(held, tmp_path, number)


def test_a_writer_removes_what_killed_ones_left_and_nothing_else(tmp_path):
    first = Folder(tmp_path)
    for _ in range(3):
        first.write(weights())
    for name in ("000000000004-00000000.data", "000000000002-00000000.data", "000000000004-00000000.part", "notes.txt"):
        (tmp_path / name).write_text("left")
    Folder(tmp_path, token="another key").write(weights())
    assert numbers(os.listdir(tmp_path)) == [1, 2, 3, 4]
    second = Folder(tmp_path)
    assert second.write(weights()).number == 5
    second.write(weights())
    # The one of another key may be needed by somebody.
    assert numbers(os.listdir(tmp_path)) == [4, 5, 6]
    names = files(tmp_path)
    assert "notes.txt" in names
    assert not [name for name in names if name.endswith(".part")]
    assert len(files(tmp_path, ".data")) == 3


KILLED = """
import sys, torch
from weightsync.files import Folder

def gathered():
    yield "a", torch.ones(1000)
    print("writing", flush=True)
    sys.stdin.read()

folder = Folder(sys.argv[1])
folder.write({"a": torch.zeros(1000), "b": torch.zeros(3)})
folder.write(gathered())
"""


def test_a_writer_that_is_killed_leaves_the_version_before(tmp_path, held):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "writing\n"
        writer.kill()
    assert files(tmp_path, ".json") == ["000000000001.json"]
    assert len(files(tmp_path, ".data")) == 2
    take(held, tmp_path, 1)
    done = Folder(tmp_path).write({"a": torch.ones(1000), "b": torch.zeros(3)})
    assert (done.number, done.full) == (2, True)
    take(held, tmp_path, 2)
    assert bool(held.weights()["a"].all())
    assert len(files(tmp_path)) == 4
