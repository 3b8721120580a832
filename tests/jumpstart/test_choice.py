"""Which profile a boot loads: the rules, for any candidates."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from jumpstart.choice import (
    EQUAL_SHARES,
    TRIAL_TIMEOUT_S,
    TRIALS,
    Ballot,
    Candidate,
    Step,
    Votes,
    choose,
    may_not,
    next_step,
)
from jumpstart.records import Reason

VOTES = st.builds(Votes, st.integers(0, 200), st.integers(0, 10))
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        st.uuids().map(lambda each: each.hex),
        st.sampled_from(["now", "before", "long ago"]),
        st.floats(0, 1),
        VOTES,
    ),
    max_size=8,
    unique_by=lambda each: each.id,
)


@given(CANDIDATES, st.data(), st.integers())
def test_none_that_may_not_be_loaded_is_ever_chosen(
    candidates: list[Candidate], data: st.DataObject, seed: int
) -> None:
    ids = [each.id for each in candidates]
    avoid = set(data.draw(st.lists(st.sampled_from(ids)))) if ids else set()
    chosen = choose(candidates, build="now", avoid=avoid, seed=seed)
    allowed = [each for each in candidates if each.id not in avoid and not each.votes.is_outvoted]
    if chosen is None:
        assert not any(each.build == "now" or each.share > 0 for each in allowed)
        return
    assert chosen in allowed
    if any(each.build == "now" for each in allowed):
        assert chosen.build == "now"
    else:
        assert chosen.share > 0
        assert chosen.share >= max(each.share for each in allowed) - EQUAL_SHARES


@given(CANDIDATES, st.integers(), st.randoms(use_true_random=False))
def test_the_same_seed_chooses_the_same_in_any_order(candidates: list[Candidate], seed: int, dice: object) -> None:
    shuffled = list(candidates)
    dice.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis' own kind of Random
    first = choose(candidates, build="now", avoid=(), seed=seed)
    assert choose(shuffled, build="now", avoid=(), seed=seed) == first


def test_equals_are_chosen_alike() -> None:
    three = [Candidate(id, "now") for id in "abc"]
    counts = Counter(choice.id for seed in range(3000) if (choice := choose(three, build="now", avoid=(), seed=seed)))
    assert sum(counts.values()) == 3000
    assert min(counts.values()) > 850 and max(counts.values()) < 1150


def test_praise_draws_no_crowd_and_a_vote_against_keeps_most_away() -> None:
    candidates = [
        Candidate("new", "now"),
        Candidate("praised", "now", votes=Votes(100, 0)),
        Candidate("suspect", "now", votes=Votes(0, 1)),
    ]
    chosen = (choose(candidates, build="now", avoid=(), seed=seed) for seed in range(2200))
    counts = Counter(each.id for each in chosen if each)
    assert 850 < counts["new"] < 1150 and 850 < counts["praised"] < 1150
    assert 100 < counts["suspect"] < 320  # one in eleven


def test_a_profile_that_crashed_several_hosts_is_left_out_unless_far_more_are_well() -> None:
    assert not Votes(0, 1).is_outvoted
    assert Votes(0, 2).is_outvoted and Votes(39, 2).is_outvoted
    assert not Votes(40, 2).is_outvoted
    refusal = may_not(Candidate("x", "now", votes=Votes(3, 2)), ())
    assert refusal is not None and refusal.reason is Reason.OUTVOTED and "crashed 2 hosts" in refusal.detail
    refusal = may_not(Candidate("x", "now"), {"x"})
    assert refusal is not None and refusal.reason is Reason.CRASHED
    assert may_not(Candidate("x", "now"), {"y"}) is None


@given(VOTES, VOTES)
def test_weights_are_shares_and_a_vote_against_never_helps(votes: Votes, more: Votes) -> None:
    assert 0 < votes.weight <= 1
    assert Votes(votes.healthy, votes.crashed + 1).weight < votes.weight
    assert Votes(votes.healthy + more.healthy, votes.crashed).weight >= votes.weight


def test_what_applies_nowhere_is_not_loaded() -> None:
    assert choose([Candidate("a", "before", 0.0)], build="now", avoid=(), seed=1) is None
    assert choose([], build="now", avoid=(), seed=1) is None
    nearer = [Candidate("far", "before", 0.5), Candidate("near", "long ago", 0.9)]
    assert {choose(nearer, build="now", avoid=(), seed=seed) for seed in range(50)} == {nearer[1]}


# -- trials --

HOSTS = [f"{number:016x}" for number in range(12)]


@given(st.integers(0, 12), st.data())
def test_few_try_a_bad_profile_and_none_waits_for_ever(vanishing: int, data: st.DataObject) -> None:
    """Hosts take their steps in any order; those that try the bad one crash, or vanish, and the good one is well."""
    marks: dict[str, dict[str, float]] = {"bad": {}, "good": {}}
    healthy: set[str] = set()
    crashed: set[str] = set()
    tried: set[str] = set()
    preferred = {host: data.draw(st.permutations(["bad", "good"])) for host in HOSTS}
    open_hosts = list(HOSTS)
    now = 0.0
    for _ in range(1000):
        if not open_hosts:
            break
        now += 1
        host = open_hosts.pop(data.draw(st.integers(0, len(open_hosts) - 1)))
        ballots = {
            "bad": Ballot(frozenset(), frozenset(crashed), marks["bad"]),
            "good": Ballot(frozenset(healthy), frozenset(), marks["good"]),
        }
        step = next_step(preferred[host], ballots, host, now)
        if step.kind == "mark":
            marks[step.id][host] = now
        if step.kind == "take" and step.id == "bad":
            tried.add(host)
            if len(tried) > vanishing:
                crashed.add(host)
            continue
        if step.kind == "take":
            healthy.add(host)
            continue
        open_hosts.append(host)
    assert not open_hosts
    assert len(tried) <= TRIALS


@given(
    st.sets(st.sampled_from(HOSTS)),
    st.sets(st.sampled_from(HOSTS)),
    st.dictionaries(st.sampled_from(HOSTS), st.floats(0, 1000)),
    st.sampled_from(HOSTS),
)
def test_every_trial_is_decided_in_time(
    healthy: set[str], crashed: set[str], marks: dict[str, float], host: str
) -> None:
    ballot = Ballot(frozenset(healthy), frozenset(crashed), marks)
    assert next_step(["a"], {"a": ballot}, host, 1001 + TRIAL_TIMEOUT_S).kind != "wait"
    if ballot.votes(0).is_outvoted:
        assert next_step(["a"], {"a": ballot}, host, 0).kind == "none"


def test_a_host_that_crashed_is_not_counted_as_well() -> None:
    assert Ballot(frozenset("ab"), frozenset("b")).votes() == Votes(1, 1)


def test_where_the_preferred_one_is_on_trial_a_proven_one_is_taken() -> None:
    on_trial = Ballot(marks=dict.fromkeys(HOSTS[:3], 0.0))
    ballots = {"new": on_trial, "proven": Ballot(healthy=frozenset(HOSTS[:1]))}
    assert next_step(["new", "fresh", "proven"], ballots, HOSTS[5], 1) == Step("take", "proven")
    assert next_step(["new"], ballots, HOSTS[5], 1) == Step("wait")
    assert next_step(["new"], ballots, HOSTS[0], 1) == Step("take", "new")
