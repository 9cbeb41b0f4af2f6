"""The lines of docs/integrations push, between what stands for the classes of each framework; see `pages`."""

import contextlib

import pytest

from tests.helpers import served_digest
from tests.trainers import pages, running
from weightsync.testing import ReferenceEngine


@pytest.fixture(scope="module")
def seen(model_folder):
    """The digests of engines that start with either model, and what each page's run saw, by page."""
    one, other = (model_folder("llama", seed) for seed in (0, 1))
    digests = []
    for folder in (one, other):
        with ReferenceEngine(folder) as fresh:
            digests.append(served_digest(fresh))
    with contextlib.ExitStack() as stack:  # what a framework makes, it keeps, and so each sender keeps its engine
        urls = [stack.enter_context(ReferenceEngine(one)).url for _ in pages.PAGES]
        lines = running.run(*running.LAUNCHER, "tests.trainers.pages", str(one), str(other), *urls)
    return digests, {page: found for line in lines for page, found in line.items()}


@pytest.mark.parametrize("page", pages.PAGES)
def test_the_lines_of_a_page_push_what_the_trainer_has(seen, page):
    (one, other), found = seen
    served, error = found[page]
    assert served[:2] == [other, one]
    if pages.PAGES[page] in pages.FAILS:
        assert pages.MISSING in error
        assert served[2] == one
