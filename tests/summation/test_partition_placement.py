"""Every machine sums what the plan gives it; all-reduce and parameter servers are special cases."""

from fractions import Fraction

from depth import examples
from hypothesis import given
from hypothesis import strategies as st

from keras_het.summation.placement import cut, place_partitions, share_in_flight

rates = st.floats(0.1, 10.0)


@given(
    st.integers(1, 100_000),
    st.lists(rates, min_size=2, max_size=6),
    st.lists(rates, max_size=4),
    st.integers(1, 5_000),
)
def test_machines_sum_what_is_planned(num_elements, workers, spare, largest):
    place = place_partitions(num_elements, workers, spare, max(largest, num_elements // 200 + 1))
    assert sum(place.sizes) == num_elements
    assert min(place.sizes) >= 1
    assert max(place.sizes) <= max(largest, num_elements // 200 + 1)
    summed = [0] * (len(workers) + len(spare))
    for size, owner in zip(place.sizes, place.owners, strict=True):
        summed[owner] += size
    assert tuple(summed) == place.plan.machine_bytes


def test_all_machines_are_equally_far_at_any_place_of_the_vector():
    place = place_partitions(100_000, [2, 2, 3, 2], [1, 1], 500)
    done = dict.fromkeys(range(6), 0)
    for position, (size, owner) in enumerate(zip(place.sizes, place.owners, strict=True)):
        done[owner] += size
        if position > len(done):
            parts = [Fraction(done[m], place.plan.machine_bytes[m]) for m in done]
            most = max(Fraction(1000, bytes_) for bytes_ in place.plan.machine_bytes if bytes_)
            assert max(parts) - min(parts) <= most


def test_spare_machines_alone_sum_as_much_as_their_links_carry():
    place = place_partitions(40_000, [1.0] * 4, [1.5, 0.5], 500, workers_sum=False)
    assert place.plan.machine_bytes == (0, 0, 0, 0, 30_000, 10_000)
    assert set(place.owners) == {4, 5}
    for each in (place, place_partitions(40_000, [1.0] * 4, [1.0] * 4, 500)):
        assert min(each.owners) == 4  # with as many as workers these are parameter servers


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=8).filter(any), st.integers(1, 16))
def test_who_sums_more_has_no_fewer_messages_under_way(machine_bytes, most):
    shares = share_in_flight(machine_bytes, most)
    assert shares[machine_bytes.index(max(machine_bytes))] == most
    assert min(shares) >= 1
    by_bytes = [share for _, share in sorted(zip(machine_bytes, shares, strict=True))]
    assert by_bytes == sorted(by_bytes)


def test_messages_under_way_for_equal_links():
    def shares(num_spare):
        plan = place_partitions(10**6, [1.0] * 4, [1.0] * num_spare, 10_000).plan
        return share_in_flight(plan.machine_bytes, 6)

    assert shares(0) == (6,) * 4
    assert shares(1) == (3,) * 4 + (6,)  # a worker sums half as much as the spare machine
    assert shares(2) == (2,) * 4 + (6,) * 2
    assert shares(3) == (1,) * 4 + (6,) * 3
    assert shares(4)[4:] == (6,) * 4


@given(st.integers(1, 10**6), st.integers(100, 10**5), st.integers(1, 16))
def test_the_first_messages_are_smaller(elements, largest, num_first):
    sizes = cut(elements, max(largest, elements // 1000), num_first)
    assert sum(sizes) == elements
    first, rest = sizes[:num_first], sizes[num_first:]
    if len(set(first)) == 1 and rest and first[0] < rest[0] - 1:
        assert all(size <= max(largest, elements // 1000) // 4 for size in first)
    # of the others none differs by more than one
    assert max(rest or first) - min(rest or first) <= 1


def test_a_machine_with_few_messages_has_equal_ones():
    assert cut(700, 400, 4) == [350, 350]
    assert set(cut(1000, 3, 1)) == {2, 3}  # a quarter would be nothing
    assert cut(1200, 400, 2) == [100, 100, 333, 333, 334]


@examples(30)
@given(
    st.integers(1_000, 100_000),
    st.lists(rates, min_size=2, max_size=6),
    st.lists(rates, max_size=4),
    st.integers(1, 8),
)
def test_no_machine_is_sent_to_while_another_is_a_window_behind(
    num_elements, workers, spare, in_flight
):
    place = place_partitions(
        num_elements, workers, spare, num_elements // 60 + 1, in_flight=in_flight
    )
    flights = share_in_flight(place.plan.machine_bytes, in_flight)
    machines = range(len(flights))
    largest = [
        max((s for s, o in zip(place.sizes, place.owners, strict=True) if o == m), default=0)
        for m in machines
    ]
    ends: list[int] = []
    done = [0] * len(flights)
    for number, (size, owner) in enumerate(zip(place.sizes, place.owners, strict=True)):
        waits = place.waits[number]
        assert all(earlier < number for earlier in waits)  # nobody waits for ever
        own = [n for n in range(number) if place.owners[n] == owner]
        if len(own) >= flights[owner]:  # so many chains, in each of which one is under way
            assert own[-flights[owner]] in waits
        start = Fraction(done[owner], place.plan.machine_bytes[owner])
        for machine in machines:
            total = place.plan.machine_bytes[machine]
            if total and machine != owner:
                through = max((ends[n] for n in waits if place.owners[n] == machine), default=0)
                assert through > start * total - (flights[machine] + 1) * largest[machine]
        done[owner] += size
        ends.append(done[owner])
