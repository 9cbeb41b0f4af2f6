"""Two ranks and a mixture of experts on every supported version; apart, so that one engine runs at a time."""

import pytest


@pytest.mark.versions
@pytest.mark.shows("experts, two ranks")
def test_experts_over_two_ranks(experts):
    for folder in (experts.b, experts.a, experts.b):
        experts.push(folder, "pushed")
    experts.assert_serves(experts.b, "pushed")
    assert len(experts.digests()) == 2
