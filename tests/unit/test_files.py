"""Versions as files: what is written, what a reader holds after it, and what is refused."""

import os
import random
import subprocess
import sys

import msgspec
import pytest
import torch

from weightsync.errors import AuthenticationFailed, SourceError, TransferFailed, UnsupportedOption
from weightsync.files import Folder
from weightsync.files.held import HeldVersion
from weightsync.files.places import open_place
from weightsync.files.shelf import numbers, read_version
from weightsync.protocol import auth, version_files
from weightsync.tensors.layout import DTYPES


def weights(seed=0):
    """Tensors of every dtype and of unusual shapes."""
    chance = torch.Generator().manual_seed(seed)
    made = {
        name: torch.randint(0, 2 if dtype == torch.bool else 256, (300 * dtype.itemsize,), generator=chance)
        .to(torch.uint8)
        .view(dtype)
        for name, dtype in DTYPES.items()
    }
    turned = torch.randn(64, 512, generator=chance).bfloat16().t()
    return {**made, "turned": turned, "nothing": torch.empty(0, 3), "one": torch.tensor(1.5), "large": _large(chance)}


def _large(chance):
    return torch.randn(1500, 1000, generator=chance).bfloat16()


def stepped(before, seed=1):
    """The same, with one element in a hundred of the large tensor changed, and one of another."""
    after = {name: tensor.clone() for name, tensor in before.items()}
    flat = after["large"].view(-1)
    at = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(seed))[: flat.numel() // 100]
    flat.view(torch.int16)[at] += 1
    after["float32"][7] = float("nan")
    return after


def same(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(_bytes(found[name]), _bytes(expected[name])) for name in expected
    )


def _bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.fixture
def held(made):
    return made(HeldVersion())


def take(held, where, number):
    """Have ``held`` read a version and those between."""
    place = open_place(where)
    version = read_version(place, number, auth.sender_token())
    if version.manifest.parent != held.number and version.manifest.parent:
        take(held, where, version.manifest.parent)
    held.take(place, version)


def files(where, ending=""):
    return sorted(name for name in os.listdir(where) if name.endswith(ending))


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


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    """A folder of a full version and a delta."""
    folder = Folder(tmp_path)
    folder.write(weights())
    folder.write(stepped(weights()))
    return tmp_path


def data_of(where, number):
    return next(where.glob(f"{number:012d}-*.data"))


def test_any_change_of_a_manifest_is_noticed(written):
    place, chance = open_place(written), random.Random(0)
    path = written / "000000000002.json"
    content = path.read_bytes()
    for _ in range(300):
        bad = bytearray(content)
        at = chance.randrange(len(bad))
        bad[at] ^= 1 << chance.randrange(8)
        path.write_bytes(bad if chance.random() < 0.8 else bad[:at])
        with pytest.raises((AuthenticationFailed, TransferFailed), match="000000000002"):
            read_version(place, 2, auth.sender_token())
    path.write_bytes(content)
    assert read_version(place, 2, auth.sender_token()).manifest.number == 2


def test_a_manifest_of_another_key_or_under_another_name_is_refused(written):
    place = open_place(written)
    with pytest.raises(AuthenticationFailed, match=r"000000000002\.json was not signed with this key"):
        read_version(place, 2, "another key")
    (written / "000000000001.json").rename(written / "000000000003.json")
    with pytest.raises(TransferFailed, match=r"000000000003\.json is the manifest of version 1"):
        read_version(place, 3, auth.sender_token())
    (written / "000000000004.json").write_bytes(b" " * (version_files.MAX_MANIFEST_BYTES + 1))
    with pytest.raises(TransferFailed, match=r"000000000004\.json has more than"):
        read_version(place, 4, auth.sender_token())


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda raw: raw[:-1], "ends after"),
        (lambda raw: raw[:100], "ends after 100 of"),
        (lambda raw: raw + b"1", "SHA-256"),
        (lambda raw: raw[:50] + bytes([raw[50] ^ 1]) + raw[51:], "SHA-256"),
        (lambda raw: None, "No such file"),
    ],
)
def test_damaged_bytes_are_refused_by_name(written, held, number, damage, said):
    if number == 2:
        take(held, written, 1)
    data = data_of(written, number)
    bad = damage(data.read_bytes())
    data.unlink()
    if bad is not None:
        data.write_bytes(bad)
    with pytest.raises(TransferFailed, match=rf"{data.name}.*{said}"):
        take(held, written, number)
    assert held.number == number - 1
    if number == 2:
        assert same(held.weights(), weights())


def resigned(where, number, **changes):
    """A manifest with some fields replaced, signed as if it had been written so."""
    version = read_version(open_place(where), number, auth.sender_token())
    manifest = msgspec.structs.replace(version.manifest, **changes)
    return version_files.sign(manifest, auth.sender_token())[1]


def changed(where, number, at, **changes):
    """As `resigned`, with the fields of one tensor replaced."""
    tensors = list(read_version(open_place(where), number, auth.sender_token()).manifest.tensors)
    tensors[at] = msgspec.structs.replace(tensors[at], **changes)
    return resigned(where, number, tensors=tuple(tensors))


def test_a_manifest_that_contradicts_itself_is_refused(written, held):
    take(held, written, 1)
    spec = read_version(open_place(written), 1, auth.sender_token()).manifest.tensors[0].spec
    other = msgspec.structs.replace(spec, name="other")
    for version, said in (
        (resigned(written, 2, data="../000000000002-00000000.data"), "no file of its bytes"),
        (resigned(written, 2, data="000000000001-00000000.data"), "no file of its bytes"),
        (resigned(written, 2, data="000000000002.json"), "no file of its bytes"),
        (resigned(written, 2, data_nbytes=1 << 40), "its tensors take"),
        (changed(written, 2, 0, offset=1), "at 1"),
        (changed(written, 2, 0, nbytes=5), "5 bytes of"),
        (changed(written, 2, 0, way="dense"), "0 bytes of"),
        (changed(written, 2, 0, spec=other), "has other tensors"),
        (changed(written, 2, 0, spec=msgspec.structs.replace(spec, dtype="object")), "is not a tensor"),
        (changed(written, 2, 1, spec=spec), "two tensors have the same name"),
        (resigned(written, 2, parent=0), "at 0"),
    ):
        with pytest.raises(TransferFailed, match=said):
            held.take(open_place(written), version)
        assert held.number == 1
        assert same(held.weights(), weights())


def test_a_manifest_appears_whole(tmp_path):
    """Whoever reads a file while it is replaced reads all of the one before."""
    place = open_place(tmp_path)
    place.publish("000000000001.json", "000000000001-00000000.part", b"before")
    with place.open("000000000001.json") as reading:
        place.publish("000000000001.json", "000000000001-00000000.part", b"afterwards")
        assert reading.read() == b"before"
    assert files(tmp_path) == ["000000000001.json"]


def test_what_is_no_file_is_not_waited_for(written):
    os.mkfifo(written / "000000000003.json")
    with pytest.raises(TransferFailed, match=r"000000000003\.json is not a file"):
        read_version(open_place(written), 3, auth.sender_token())


def test_links_in_the_folder_are_not_written_through(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    (tmp_path / "000000000001-00000000.part").symlink_to(elsewhere)
    (tmp_path / "000000000001.json").symlink_to(elsewhere)
    place = open_place(tmp_path)
    with pytest.raises(FileExistsError):
        place.publish("000000000001.json", "000000000001-00000000.part", b"content")
    with pytest.raises(FileExistsError):
        place.create("000000000001-00000000.part")
    place.publish("000000000001.json", "000000000001-00000001.part", b"content")
    assert elsewhere.read_text() == "precious"
    assert (tmp_path / "000000000001.json").read_bytes() == b"content"


def test_digests_are_of_whole_tensors(written, held):
    """A delta that is intact, but of another base, is noticed; what was spoiled is not held."""
    take(held, written, 1)
    held.weights()["large"].view(torch.int16)[0, 0] += 1
    with pytest.raises(TransferFailed, match="by their digests: large"):
        take(held, written, 2)
    assert held.number == 0
    take(held, written, 1)
    with pytest.raises(TransferFailed, match="by their digests: int8"):
        held.take(open_place(written), changed(written, 2, list(held.weights()).index("int8"), digest=1))
    take(held, written, 2)
    assert same(held.weights(), stepped(weights()))


def test_a_new_format_is_refused_by_name(written):
    content, _ = version_files.sign(resigned(written, 2, format=2).manifest, auth.sender_token())
    (written / "000000000002.json").write_bytes(content)
    with pytest.raises(TransferFailed, match=r"000000000002\.json is of another release: format 2"):
        read_version(open_place(written), 2, auth.sender_token())
