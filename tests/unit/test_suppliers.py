"""Which rank passes buckets on to which, and who takes over from one that is stuck."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.transports.base import Peer
from weightsync.transports.nixl.suppliers import MIN_BUCKETS, Change, Suppliers, chains

ONE, TWO, THREE, FOUR = (Peer(f"http://{host}:8000", 0) for host in "abcd")
BUCKETS = 10
LONG_S = 1000.0


def test_ranks_form_a_chain_in_order_of_their_hosts():
    members = [("", "b", ONE), ("", "a", TWO), ("", "c", THREE), ("rows", "a", FOUR)]
    assert chains(members, BUCKETS) == {ONE: TWO, THREE: ONE}


def test_ranks_that_need_different_parts_pass_nothing_on_to_each_other():
    assert chains([("top", "a", ONE), ("bottom", "b", TWO)], BUCKETS) == {}


def test_too_few_buckets_are_not_passed_on():
    members = [("", "a", ONE), ("", "b", TWO)]
    assert chains(members, MIN_BUCKETS - 1) == {}
    assert chains(members, MIN_BUCKETS) == {TWO: ONE}


@pytest.mark.parametrize(
    ("hosts", "found"),
    [(2, {TWO: ONE, FOUR: THREE}), (3, {TWO: ONE, FOUR: THREE}), (4, {}), (9, {})],
)
def test_a_trainer_on_several_hosts_writes_to_as_many_ranks(hosts, found):
    members = [("", "b" if peer == ONE else "c", peer) for peer in (ONE, TWO, THREE, FOUR)]
    assert chains(members, BUCKETS, hosts) == found


@given(st.integers(2, 40), st.integers(MIN_BUCKETS, 40))
def test_more_ranks_than_buckets_form_a_tree(count, buckets):
    peers = [Peer("http://a:8000", number) for number in range(count)]
    found = chains([("", "a", peer) for peer in peers], buckets)
    assert found.keys() == set(peers[1:])
    most = max(list(found.values()).count(peer) for peer in peers)
    assert most == (1 if count <= buckets else 2)
    for peer in peers[1:]:
        passed = [peer]
        while passed[-1] in found:
            passed.append(found[passed[-1]])
            assert len(passed) <= count
        assert passed[-1] == peers[0]
        assert len(passed) <= (count if count <= buckets else count.bit_length())


def chain(*, whole=True):
    return Suppliers({TWO: ONE, THREE: TWO}, whole, 9 * LONG_S, 0.0)


def test_ranks_that_are_level_or_get_on_are_left_alone():
    suppliers, taken = chain(), {ONE: -1, TWO: -1, THREE: -1}
    for second in range(int(LONG_S)):
        # One bucket every 100 s; each rank takes it a little later than its supplier.
        for lag, peer in enumerate((ONE, TWO, THREE)):
            taken[peer] = max(-1, (second - lag) // 100)
        assert suppliers.changes(float(second), second // 100, taken.get) == []


@pytest.mark.parametrize(
    ("taken", "changes"),
    [
        ((9, 9, 2), [Change(THREE, TWO, None)]),
        ((9, 2, 2), [Change(TWO, ONE, None), Change(THREE, TWO, None)]),
        ((2, 2, 2), [Change(TWO, ONE, None)]),
        ((9, 9, 9), []),
    ],
)
def test_the_trainer_takes_over_if_its_arena_holds_everything(taken, changes):
    suppliers, has = chain(), dict(zip((ONE, TWO, THREE), taken, strict=True))
    suppliers.changes(0.0, 9, has.get)
    assert suppliers.changes(LONG_S, 9, has.get) == changes
    assert suppliers.changes(LONG_S, 9, has.get) == []
    assert all(suppliers.of[change.receiver] is None for change in changes)


def test_ranks_that_stop_at_once_are_each_given_one_other_supplier():
    """Two changes for one rank would have the trainer write to it twice."""
    suppliers, has = chain(), {ONE: 5, TWO: 4, THREE: 3}
    suppliers.changes(0.0, 9, has.get)
    assert suppliers.changes(LONG_S, 9, has.get) == [Change(TWO, ONE, None), Change(THREE, TWO, None)]
    assert suppliers.of == {ONE: None, TWO: None, THREE: None}
    assert suppliers.changes(LONG_S + 1.0, 9, has.get) == [], "they have just begun"


def test_a_slow_link_is_no_stuck_one():
    suppliers = Suppliers({TWO: ONE}, True, 9 * LONG_S, 0.0)
    assert suppliers.changes(0.0, 0, {ONE: -1, TWO: -1}.get) == []
    assert suppliers.changes(3.0, 0, {ONE: 0, TWO: -1}.get) == []
    assert suppliers.changes(12.0, 0, {ONE: 0, TWO: -1}.get) == []
    assert suppliers.changes(LONG_S, 0, {ONE: 0, TWO: -1}.get) == [Change(TWO, ONE, None)]


def test_a_stuck_rank_gets_another_supplier_within_the_time_limit():
    suppliers = Suppliers({TWO: ONE}, True, 8.0, 0.0)
    assert suppliers.changes(1.5, 0, {ONE: 0, TWO: -1}.get) == []
    assert suppliers.changes(2.5, 8, {ONE: 8, TWO: -1}.get) == [Change(TWO, ONE, None)]


def test_otherwise_a_rank_that_is_ahead_takes_over():
    suppliers = chain(whole=False)
    has = {ONE: 9, TWO: 2, THREE: 2}
    suppliers.changes(0.0, 9, has.get)
    # No rank but ONE has what TWO lacks, and what THREE lacks comes from ONE.
    assert suppliers.changes(LONG_S, 9, has.get) == [Change(TWO, ONE, ONE), Change(THREE, TWO, ONE)]
    assert suppliers.of == {ONE: None, TWO: ONE, THREE: ONE}


def test_the_only_one_that_is_ahead_tries_again_until_the_other_takes_something():
    suppliers = Suppliers({TWO: ONE}, False, 9 * LONG_S, 0.0)
    has = {ONE: 9, TWO: 2}
    expected = {0.0: [], 10.0: [Change(TWO, ONE, ONE)], 12.0: [], 20.0: [Change(TWO, ONE, ONE)]}
    assert {second: suppliers.changes(second, 9, has.get) for second in expected} == expected
    has[TWO] = 9
    assert suppliers.changes(30.0, 9, has.get) == suppliers.changes(LONG_S, 9, has.get) == []


def test_a_rank_is_never_supplied_by_one_that_it_supplies():
    suppliers = chain(whole=False)
    has = {ONE: 9, TWO: 2, THREE: 9}
    suppliers.changes(0.0, 9, has.get)
    assert suppliers.changes(LONG_S, 9, has.get)[0] == Change(TWO, ONE, ONE)


def test_ranks_that_wait_for_another_are_not_late():
    suppliers = chain()
    assert suppliers.late({TWO, THREE}) == {TWO}
    assert suppliers.late({ONE, THREE}) == {ONE, THREE}
    assert suppliers.late({ONE, TWO, THREE, FOUR}) == {ONE, FOUR}
    assert suppliers.late(set()) == set()


def test_a_rank_that_recovers_may_be_stuck_again():
    suppliers, has = chain(), {ONE: 9, TWO: 9, THREE: 2}
    suppliers.changes(0.0, 9, has.get)
    assert suppliers.changes(LONG_S, 9, has.get) == [Change(THREE, TWO, None)]
    has[THREE] = 5
    assert suppliers.changes(LONG_S + 1, 9, has.get) == []
    # It gets its buckets from the trainer now, which has no other for it.
    assert suppliers.changes(9 * LONG_S, 9, has.get) == []
