"""Poisson and cyclic Poisson sampling: the law of the draws, and what a draw touches.

Seeds are fixed; under the right law, each statistical test fails for one seed in 10⁴ or fewer.
"""

from __future__ import annotations

import hashlib
import math
import tracemalloc
from collections import Counter
from fractions import Fraction
from itertools import combinations, count, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpkfc import permutation, sampling
from dpkfc.random import first_key, next_key, sub_key, uniform_bits
from dpkfc.sampling import CyclicPoisson, poisson_sample

KEY = b"k" * 32
keys = st.binary(min_size=32, max_size=32)


def key_of(number: int) -> bytes:
    return sub_key(first_key(0), f"test {number}")


def hash_stream(key: bytes, count: int) -> np.ndarray:
    """A stream that does not depend on the library's cipher: SHA-256 of a counter."""
    blocks = (hashlib.sha256(key + n.to_bytes(8, "big")).digest() for n in range(-(-count // 4)))
    return np.frombuffer(b"".join(blocks), "<u8")[:count]


def naive_sample(key: bytes, records: int, rate: float) -> list[int]:
    """One Bernoulli draw per record: what `poisson_sample` must have the law of."""
    return np.flatnonzero(uniform_bits(key, records) < np.uint64(int(rate * 2**64))).tolist()


# -- the arithmetic, compared with exact fractions


@pytest.mark.parametrize("rate", [0.5, 0.3, 1e-3, 2**-20, 1e-6, 1 - 2**-53, 0.999, 2**-30])
def test_the_digits_of_a_gap_have_their_exact_probabilities(rate: float) -> None:
    """``x^(2^k) / (1 + x^(2^k))``, and ``x^(2^K)`` for all higher ones, here in 2000 digits."""
    probabilities = sampling._digit_probabilities(rate)
    digits, x = 2000, (1 << 2000) - int(Fraction(rate) * (1 << 2000))
    for k, p in enumerate(probabilities):
        last = k == len(probabilities) - 1
        exact = Fraction(x, 1 << digits) if last else Fraction(x, (1 << digits) + x)
        assert abs(exact - Fraction(p, 2**272)) < Fraction(2, 2**272)
        x = x * x >> digits
    assert probabilities[-1] == 0, "no gap has more digits, up to 2⁻²⁷²"


@pytest.mark.parametrize("rate", [0.5, 0.3, 0.05, 0.97])
def test_gaps_with_these_digits_are_geometric(rate: float) -> None:
    """The product of the digits' probabilities is q (1-q)^g, for every g."""
    probabilities = [Fraction(p, 2**272) for p in sampling._digit_probabilities(rate)]
    for gap in range(2 ** min(8, len(probabilities))):
        product_of_digits = math.prod(
            p if gap >> k & 1 else 1 - p for k, p in enumerate(probabilities)
        )
        exact = Fraction(rate) * (1 - Fraction(rate)) ** gap
        assert abs(product_of_digits - exact) < Fraction(1, 2**260)


def test_a_tiny_rate_keeps_its_probability_of_no_record_at_all() -> None:
    """Gaps of 2⁶² and more are one event, of probability (1-q)^(2⁶²)."""
    *_, beyond = sampling._digit_probabilities(2**-62)
    assert beyond / 2**272 == pytest.approx(math.exp(-1), rel=1e-12)
    *_, beyond = sampling._digit_probabilities(2**-400)
    assert beyond < 2**272
    assert sampling._digit_probabilities(5e-324) == ()
    assert poisson_sample(KEY, 2**40, 5e-324) == poisson_sample(KEY, 2**40, 0.0) == []


@settings(max_examples=40, deadline=None)
@given(keys, st.floats(1e-9, 0.999), st.integers(0, 50))
def test_gaps_are_the_comparisons_of_272_random_bits(key: bytes, rate: float, size: int) -> None:
    """Digit by digit in Python's integers."""
    probabilities = sampling._digit_probabilities(rate)
    digits = len(probabilities)
    raw = uniform_bits(key, size * digits + 1).tobytes()
    expected = []
    for gap in range(size):
        value = 0
        for digit, p in enumerate(probabilities):
            at = 2 * (gap * digits + digit)
            random = int.from_bytes(raw[at : at + 2], "little") << 256
            random += int.from_bytes(sub_key(key, f"digit {digit} of gap {gap}"), "big")
            value += (random < p) << digit
        expected.append(value)
    assert sampling._gaps(key, size, probabilities).tolist() == expected


def test_most_draws_need_16_bits_and_some_need_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digit whose first 16 bits equal those of its probability is decided by 256 more."""
    asked: list[tuple[int, int]] = []

    def more(key: bytes, gap: int, digit: int) -> int:
        asked.append((int(gap), int(digit)))
        return 0 if digit == 0 else 2**256 - 1

    monkeypatch.setattr(sampling, "_more_bits", more)
    half, quarter = 2**271 + 1, 2**270 + 1
    words = np.array([[2**15, 2**14], [2**15 - 1, 2**14 - 1], [2**15 + 1, 2**14 + 1]], "<u2")
    stream = np.concatenate([words.ravel(), np.zeros(2, "<u2")]).view("<u8")
    monkeypatch.setattr(sampling, "uniform_bits", lambda key, count: stream[:count])
    assert sampling._gaps(KEY, 3, (half, quarter)).tolist() == [0b01, 0b11, 0b00]
    assert asked == [(0, 0), (0, 1)]


# -- the law of the draws


def test_all_subsets_of_four_records_have_their_probabilities() -> None:
    """The whole law at once, independence of all orders included: 2⁴ subsets, 20,000 keys."""
    for rate in (0.5, 0.2, 0.9):
        drawn = Counter(tuple(poisson_sample(key_of(n), 4, rate)) for n in range(20_000))
        subsets = [s for size in range(5) for s in combinations(range(4), size)]
        expected = [20_000 * rate ** len(s) * (1 - rate) ** (4 - len(s)) for s in subsets]
        assert set(drawn) <= set(subsets)
        assert stats.chisquare([drawn[s] for s in subsets], expected).pvalue > 1e-4


@pytest.mark.parametrize(("records", "rate"), [(1000, 0.02), (3000, 0.4), (700, 0.99)])
def test_records_are_drawn_equally_often_and_batch_sizes_are_binomial(
    records: int, rate: float
) -> None:
    """Across the ends of chunks too, and like one Bernoulli draw per record."""
    times, sizes, naive_sizes = np.zeros(records), [], []
    rounds = 1000
    for n in range(rounds):
        rows = poisson_sample(key_of(n), records, rate)
        times[rows] += 1
        sizes.append(len(rows))
        naive_sizes.append(len(naive_sample(key_of(n), records, rate)))
    deviations = (times - rounds * rate) / math.sqrt(rounds * rate * (1 - rate))
    assert stats.chi2.sf((deviations**2).sum(), records) > 1e-4
    assert stats.chi2.cdf((deviations**2).sum(), records) > 1e-4
    assert stats.binomtest(sum(sizes), rounds * records, rate).pvalue > 1e-4
    spread = np.var(sizes) / (records * rate * (1 - rate)) * rounds
    assert 1e-4 < stats.chi2.cdf(spread, rounds - 1) < 1 - 1e-4
    assert stats.ks_2samp(sizes, naive_sizes).pvalue > 1e-4


def test_pairs_of_records_are_drawn_independently() -> None:
    records, rate, rounds = 12, 0.3, 6000
    drawn = np.zeros((rounds, records))
    for n in range(rounds):
        drawn[n, poisson_sample(key_of(n), records, rate)] = 1
    deviations = (drawn - rate) / math.sqrt(rate * (1 - rate))
    for i, j in combinations(range(records), 2):
        assert abs((deviations[:, i] * deviations[:, j]).sum()) < 5 * math.sqrt(rounds)


def test_draws_of_successive_keys_are_independent() -> None:
    key, records, rate, rounds = first_key(1), 50, 0.2, 4000
    drawn = np.zeros((rounds, records))
    for n in range(rounds):
        drawn[n, poisson_sample(key, records, rate)] = 1
        key = next_key(key)
    again = (drawn[1:] * drawn[:-1]).sum()
    assert stats.binomtest(int(again), (rounds - 1) * records, rate**2).pvalue > 1e-4


@pytest.mark.parametrize("records", [2**40, 10**9, 10**6])
def test_the_drawn_records_are_spread_over_all(records: int) -> None:
    rows = [row for n in range(40) for row in poisson_sample(key_of(n), records, 500 / records)]
    assert stats.kstest(np.array(rows) / records, "uniform").pvalue > 1e-4
    assert stats.poisson.cdf(len(rows), 20_000) > 1e-4 < stats.poisson.sf(len(rows), 20_000)


# -- edges


@settings(max_examples=100, deadline=None)
@given(
    keys,
    st.one_of(st.integers(0, 3), st.integers(0, 2000), st.sampled_from([2**40, 2**48])),
    st.one_of(st.sampled_from([0.0, 1e-300, 1e-12, 0.5, 1 - 2**-53, 1.0]), st.floats(0, 1)),
)
def test_rows_are_distinct_increasing_and_within_range(
    key: bytes, records: int, rate: float
) -> None:
    if records > 2000:
        rate = min(rate, 3000 / records)
    rows = poisson_sample(key, records, rate)
    assert all(type(row) is int for row in rows[:3])
    assert rows == sorted(set(rows))
    assert not rows or (rows[0] >= 0 and rows[-1] < records)


def test_rates_of_nearly_one_and_of_one() -> None:
    assert poisson_sample(KEY, 5, 1.0) == [0, 1, 2, 3, 4]
    assert poisson_sample(KEY, 0, 1.0) == poisson_sample(KEY, 0, 0.5) == []
    missing = sum(10**5 - len(poisson_sample(key_of(n), 10**5, 1 - 1e-4)) for n in range(20))
    assert stats.poisson.cdf(missing, 200) > 1e-4 < stats.poisson.sf(missing, 200)
    assert poisson_sample(KEY, 10**5, 1 - 2**-53) == list(range(10**5))


def test_a_rate_of_one_in_a_million_millions() -> None:
    sizes = [len(poisson_sample(key_of(n), 2**40, 1e-12)) for n in range(3000)]
    total = 3000 * 2**40 * 1e-12
    assert stats.poisson.cdf(sum(sizes), total) > 1e-4 < stats.poisson.sf(sum(sizes), total)
    zeros = sizes.count(0)
    assert stats.binomtest(zeros, 3000, math.exp(-(2**40) * 1e-12)).pvalue > 1e-4


def test_too_many_records_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 2⁴⁸"):
        poisson_sample(KEY, 2**48 + 1, 1e-12)


@settings(max_examples=60, deadline=None)
@given(keys, st.integers(0, 4000), st.integers(0, 4000), st.floats(0, 1))
def test_appended_records_change_nothing_for_the_others(
    key: bytes, records: int, appended: int, rate: float
) -> None:
    longer = poisson_sample(key, records + appended, rate)
    assert [row for row in longer if row < records] == poisson_sample(key, records, rate)


def numbers_drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the random 64-bit integers that are asked for."""
    asked: list[int] = []

    def counted(key: bytes, count: int) -> np.ndarray:
        asked.append(count)
        return uniform_bits(key, count)

    monkeypatch.setattr(sampling, "uniform_bits", counted)
    monkeypatch.setattr(permutation, "uniform_bits", counted)
    return asked


def test_a_draw_touches_no_number_per_record(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = numbers_drawn(monkeypatch)
    tracemalloc.start()
    try:
        assert 800 < len(poisson_sample(KEY, 10**12, 1000 / 10**12)) < 1200
        assert sum(asked) < 50_000
        for groups in (2, 300, 10**6):
            asked.clear()
            sampler = CyclicPoisson(
                KEY, 10**9, groups, groups * 1000 / 10**9, planned_records=10**9
            )
            assert 800 < len(sampler.draw(KEY, 17)) < 1200
            assert sum(asked) < 1_000_000, "16 tables of 2¹⁵ or 2¹⁶ numbers, two per integer"
            asked.clear()
            sampler.draw(sub_key(KEY, "next"), 18)
            assert sum(asked) < 100_000, "the tables are kept"
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


# -- cyclic Poisson


def cyclic(
    records: int, groups: int, rate: float, key: bytes = KEY, planned: int | None = None
) -> CyclicPoisson:
    return CyclicPoisson(key, records, groups, rate, planned_records=planned or records)


@settings(max_examples=40, deadline=None)
@given(keys, st.integers(1, 300), st.integers(2, 40), st.floats(0.05, 1))
def test_a_record_joins_only_the_turns_of_one_group(
    key: bytes, records: int, groups: int, rate: float
) -> None:
    sampler = cyclic(records, groups, rate, key)
    turns: dict[int, set[int]] = {row: set() for row in range(records)}
    for step in range(3 * groups):
        rows = sampler.draw(sub_key(key, f"step {step}"), step)
        assert rows == sorted(set(rows))
        for row in rows:
            turns[row].add(step % groups)
    assert max(len(found) for found in turns.values()) <= 1


@pytest.mark.parametrize("records", [37, 20_000, 1_500_000])
def test_whole_groups_in_turn_use_every_record_once_in_a_cycle(records: int) -> None:
    """A shuffle of slots, and a network."""
    sampler = cyclic(records, 12, 1.0)
    rows = [row for step in range(12) for row in sampler.draw(key_of(step), step)]
    assert sorted(rows) == list(range(records))
    again = [row for step in range(12, 24) for row in sampler.draw(key_of(step), step)]
    assert rows == again, "the group of a record is fixed for the run"


def test_groups_of_three_records_are_those_of_a_random_choice_of_slots() -> None:
    """All labelings at once, over 20,000 keys: three of eight slots, two groups of four slots."""
    found: Counter[tuple[int, ...]] = Counter()
    for n in range(20_000):
        sampler = cyclic(3, 2, 1.0, key_of(n))
        odd = set(sampler.draw(KEY, 1))
        found[tuple(int(row in odd) for row in range(3))] += 1
    expected = {}
    for labels in product((0, 1), repeat=3):
        free, probability = [4, 4], Fraction(1)
        for position, label in enumerate(labels):
            probability *= Fraction(free[label], 8 - position)
            free[label] -= 1
        expected[labels] = float(20_000 * probability)
    assert stats.chisquare([found[s] for s in expected], list(expected.values())).pvalue > 1e-4


def test_removing_any_record_leaves_the_law_of_the_others() -> None:
    """Groups of the records that remain, in order: the same whichever of five was removed.

    And the same as in a data set of four under the same plan. A fixed function of the position
    fails this: records behind the removed one would move to other groups.
    """
    laws: dict[int | None, Counter[tuple[int, ...]]] = {}
    for case, removed in enumerate((None, 0, 2, 4)):
        laws[removed] = Counter()
        for n in range(8000):
            present = 4 if removed is None else 5
            sampler = cyclic(present, 2, 1.0, key_of(8000 * case + n), planned=5)
            odd = set(sampler.draw(KEY, 1))
            laws[removed][tuple(int(r in odd) for r in range(present) if r != removed)] += 1
    outcomes = sorted(set().union(*laws.values()))
    table = [[law[outcome] for outcome in outcomes] for law in laws.values()]
    assert len(outcomes) == 16
    assert stats.chi2_contingency(table).pvalue > 1e-4


@pytest.mark.parametrize(("records", "groups"), [(20_000, 7), (1_500_000, 100)])
def test_groups_are_uniform_and_unrelated_to_the_order_of_records(
    records: int, groups: int
) -> None:
    label = np.empty(records, int)
    sampler = cyclic(records, groups, 1.0)
    for group in range(groups):
        label[sampler.draw(KEY, group)] = group
    slots = sampling.slots_for(records)
    # a choice without replacement varies less than independent ones
    sizes = np.bincount(label, minlength=groups)
    excess = ((sizes - records / groups) ** 2).sum() * groups / records / (1 - records / slots)
    assert 1e-4 < stats.chi2.cdf(excess, groups - 1) < 1 - 1e-4
    for lag in (1, 2, groups, 1024):
        pairs = np.bincount((label[lag:] - label[:-lag]) % groups, minlength=groups)
        assert stats.chisquare(pairs).pvalue > 1e-4


@pytest.mark.parametrize(("records", "groups", "rate"), [(60, 3, 0.4), (50, 5, 0.9)])
def test_members_join_their_turns_independently_at_the_rate(
    records: int, groups: int, rate: float
) -> None:
    whole, sampler = cyclic(records, groups, 1.0), cyclic(records, groups, rate)
    cycles, key = 1500, first_key(3)
    for group in range(groups):
        members = whole.draw(KEY, group)
        drawn = np.zeros((cycles, records))
        for cycle in range(cycles):
            drawn[cycle, sampler.draw(key, cycle * groups + group)] = 1
            key = next_key(key)
        assert drawn.sum() == drawn[:, members].sum()
        drawn = drawn[:, members]
        assert stats.binomtest(int(drawn.sum()), drawn.size, rate).pvalue > 1e-4
        deviations = (drawn - rate) / math.sqrt(rate * (1 - rate))
        for i, j in combinations(range(len(members)), 2):
            assert abs((deviations[:, i] * deviations[:, j]).sum()) < 5.5 * math.sqrt(cycles)
        for column in deviations.T:
            assert abs(column.sum()) < 5 * math.sqrt(cycles)
            assert abs((column[1:] * column[:-1]).sum()) < 5 * math.sqrt(cycles)


@settings(max_examples=40, deadline=None)
@given(keys, st.integers(1, 200), st.integers(0, 100), st.integers(2, 12), st.floats(0.05, 1.0))
def test_in_groups_too_appended_records_change_nothing_for_the_others(
    key: bytes, records: int, appended: int, groups: int, rate: float
) -> None:
    """Under one plan: its number of records is public, the data set's need not be."""
    planned = records + appended
    fewer = cyclic(records, groups, rate, key, planned)
    more = cyclic(records + appended, groups, rate, key, planned)
    for step in range(groups + 1):
        rows = more.draw(sub_key(key, str(step)), step)
        assert [r for r in rows if r < records] == fewer.draw(sub_key(key, str(step)), step)


def test_more_records_than_slots_are_refused_without_saying_how_many() -> None:
    assert len(cyclic(128, 4, 1.0, planned=64).draw(KEY, 0)) == 32
    with pytest.raises(ValueError, match="more than twice the 64 records") as refused:
        cyclic(129, 4, 1.0, planned=64)
    assert "129" not in str(refused.value)
    assert cyclic(10**6, 1, 1e-6, planned=64).records == 10**6, "one group needs no slots"


def test_more_groups_than_slots() -> None:
    sampler = cyclic(3, 50, 1.0)
    rows = [row for step in range(50) for row in sampler.draw(KEY, step)]
    assert sorted(rows) == [0, 1, 2]


@pytest.mark.parametrize("groups", [1, 3, 10])
def test_an_empty_batch_is_no_more_likely_than_the_expected_batch_size_says(groups: int) -> None:
    """The loader counts no empty batches if this bound is tiny."""
    records, rate = 40, 0.1 * groups / 3
    empty = [0] * groups
    rounds = 3000
    for n in range(rounds):
        sampler = cyclic(records, groups, rate, key_of(n))
        for step in range(groups):
            empty[step] += not sampler.draw(sub_key(key_of(n), f"step {step}"), step)
    bound = math.exp(-sampler.expected_batch_size)
    for found in empty:
        assert stats.binomtest(found, rounds, bound, alternative="greater").pvalue > 1e-4
    assert sampler.expected_batch_size == pytest.approx(records * rate / groups, rel=0.1)


# -- recorded values


def test_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the stream, a draw is integer arithmetic. A change here changes recorded runs."""
    monkeypatch.setattr(sampling, "uniform_bits", hash_stream)
    monkeypatch.setattr(permutation, "uniform_bits", hash_stream)
    permutation.permutation.cache_clear()
    try:
        assert poisson_sample(KEY, 100, 0.1) == [0, 2, 4, 5, 24, 37, 56, 66, 74, 77, 92]
        assert poisson_sample(KEY, 2**40, 5 / 2**40) == [29085340850, 272362674455, 794122666551]
        assert poisson_sample(KEY, 20, 0.9) == [
            0,
            1,
            2,
            4,
            5,
            6,
            7,
            8,
            9,
            10,
            11,
            12,
            13,
            14,
            15,
            16,
            17,
            18,
        ]
        assert cyclic(40, 3, 0.5).draw(key_of(0), 4) == [5, 6, 9, 11, 29]
        assert cyclic(10**6, 1000, 0.01).draw(key_of(0), 5) == [
            68924,
            77561,
            173425,
            316466,
            456595,
            548782,
            728545,
            874938,
            904892,
            967375,
            987947,
        ]
    finally:
        permutation.permutation.cache_clear()


def test_a_long_draw_continues_over_many_chunks() -> None:
    """Every chunk has a key of its own: no gaps repeat."""
    rows = np.array(poisson_sample(KEY, 10**6, 0.1))
    assert len(rows) > 4 * sampling.LARGEST_CHUNK
    ends = np.cumsum([sampling._chunk_size(chunk) for chunk in range(8)])
    starts = [gaps.tobytes() for gaps in np.split(np.diff(rows), ends) if len(gaps) > 100]
    assert len({start[:400] for start in starts}) == len(starts)
    sizes = [sampling._chunk_size(chunk) for _, chunk in zip(range(200), count())]
    assert sizes[0] == sampling.FIRST_CHUNK and max(sizes) == sizes[-1] == sampling.LARGEST_CHUNK
