"""The names that docs/integrations rests on, in the source of the frameworks as their authors have published it.

``names.json`` has them all, for frameworks that are on no package index with a commit of their repository.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.source_names import names_of

pytestmark = pytest.mark.frameworks
NAMES = json.loads((Path(__file__).parent / "names.json").read_text())
#: What git says of a host that there is no way to.
UNREACHABLE = ("Could not resolve host", "Failed to connect", "Could not resolve proxy")
PUBLISHED = [name for name, table in NAMES.items() if "package" in table]


@pytest.mark.parametrize("framework", PUBLISHED)
def test_the_published_version_has_every_name(framework, tmp_path):
    table = NAMES[framework]
    wanted = f"{table['package']}=={table['version']}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", tmp_path, wanted], check=True)
    (wheel,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        for file, names in table["files"].items():
            (path,) = [path for path in archive.namelist() if path == file or path.endswith(f"/purelib/{file}")]
            assert set(names) <= names_of(archive.read(path)), file


@pytest.mark.parametrize("framework", sorted(NAMES.keys() - set(PUBLISHED)))
def test_the_commit_of_what_is_not_published_has_every_name(framework, tmp_path):
    table = NAMES[framework]
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    address = f"https://github.com/{table['repository']}"
    fetched = subprocess.run(
        [*git, "fetch", "--quiet", "--depth=1", address, table["commit"]], capture_output=True, text=True, check=False
    )
    if any(why in fetched.stderr for why in UNREACHABLE):
        pytest.skip(f"{address} cannot be reached from here")
    assert fetched.returncode == 0, fetched.stderr
    for file, names in table["files"].items():
        source = subprocess.run([*git, "show", f"FETCH_HEAD:{file}"], capture_output=True, check=True).stdout
        assert set(names) <= names_of(source), file
