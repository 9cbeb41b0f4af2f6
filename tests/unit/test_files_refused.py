"""Versions as files: what is refused, and what a reader holds after that."""

import os
import random

import msgspec
import pytest
import torch

from tests.unit.written import files, same, stepped, take, weights
from weightsync.errors import AuthenticationFailed, TransferFailed
from weightsync.files import Folder
from weightsync.files.held import HeldVersion
from weightsync.files.places import open_place
from weightsync.files.shelf import read_version
from weightsync.protocol import auth, version_files


@pytest.fixture
def held(made):
    return made(HeldVersion())


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
