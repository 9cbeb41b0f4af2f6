"""The names that docs/integrations rests on, in the source of the frameworks as their authors have published it.

``names.json`` has them all. Of frameworks that are on no package index it has the commit at which they were found.
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


def test_what_is_not_published_has_a_commit():
    others = [table for table in NAMES.values() if "package" not in table]
    assert others
    assert all(len(table["commit"]) == 40 for table in others)
