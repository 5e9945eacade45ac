"""A part of the center: what is taken, what is refused, who waits, and what is saved."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from service_doubles import ASYNCHRONOUS, SECONDS, make_rule

from keras_het.asynchronous.parameter_service import Part, Status
from keras_het.asynchronous.parameter_service.part import (
    LARGEST_SAMPLES,
    Push,
    is_finite,
    pack_state,
    unpack_state,
)
from keras_het.rules import (
    AsyncSGD,
    DelayCompensated,
    Delta,
    ElasticAveraging,
    HogwildEASGD,
    PushMeta,
    RoundRobinEASGD,
)

SIZE = 3
ONES = np.ones(SIZE, np.float32)
LARGEST = float(np.finfo(np.float32).max)
each_rule = pytest.mark.parametrize("case", ASYNCHRONOUS)


def part_with(rule=None, center=0.0, num_workers=3, **options):
    part = Part(SIZE, rule or Delta(), num_workers, **options)
    part.set_center(np.full(SIZE, center, np.float32))
    return part


def push(part, change=ONES, worker=0, number=0, version=0, samples=1, **options):
    change = np.asarray(change, np.float32)
    return part.push(Push(worker, number, version, samples, change, **options))


def found(part):
    """Copies of all that pushes can change."""
    kept = {"center": part.center, "latest": np.array(part.latest), **part.state()}
    return {name: np.array(value) for name, value in kept.items()}


def test_a_numbered_push_counts_once():
    part = part_with()
    first, again = push(part, number=1), push(part, number=1)
    assert (first.status, again.status) == (Status.OK, Status.REPEATED)
    np.testing.assert_array_equal(first.values, again.values)
    assert push(part, number=1, worker=1).status == Status.OK  # each worker has its own numbers
    for _ in range(2):
        assert push(part).status == Status.OK
    assert (part.version, part.latest.tolist()) == (4, [1, 1, 0])
    np.testing.assert_array_equal(part.pull().values, 4)


@pytest.mark.parametrize("seen", [0, 3, 500, 2**62])
def test_a_push_beyond_the_staleness_bound_is_not_taken(seen):
    """A version to come is as stale as one long past: its worker saw another service, or lies."""
    part = part_with(max_staleness=1)
    for version in range(2):
        push(part, version=version)
    answer = push(part, worker=1, version=seen, number=1)
    assert (answer.status, answer.version) == (Status.STALE, 2)
    np.testing.assert_array_equal(answer.values, 2)
    assert (part.version, part.latest.tolist()) == (2, [0, 0, 0])
    assert push(part, worker=1, version=answer.version, number=1).status == Status.OK
    assert push(part, version=seen, is_trusted=True).status == Status.OK


def test_nobody_gets_the_zeros_of_a_part_without_a_center():
    part = Part(SIZE, Delta(), 3)
    broken = np.array([0, np.nan, 0], np.float32)
    with pytest.raises(ValueError, match=r"must be finite.*diverged"):
        part.set_center(broken)
    for answer in (part.pull(), push(part, number=1)):
        assert answer == (Status.NO_CENTER, -1, None, None)
    with pytest.raises(ValueError, match="Lengths differ"):
        part.set_center(ONES[:-1])
    part.set_center(broken, is_trusted=True)
    np.testing.assert_array_equal(part.pull().values, broken)
    part.set_center(ONES)
    assert push(part, number=1).status == Status.OK


TOO_LARGE = {  # changes of which the last one would leave something that is not finite
    "not a number": (Delta, [np.nan]),
    "infinite": (lambda: HogwildEASGD(0.3), [-np.inf]),
    "delta": (Delta, [3e38, 3e38]),
    "elastic": (lambda: ElasticAveraging(0.9), [-3e38, 3e38]),
    "hogwild": (lambda: HogwildEASGD(0.9), [-3e38, 3e38]),
    "momentum": (lambda: AsyncSGD(0.5, momentum=0.9), [1.5e38, 3e38]),
    "samples": (lambda: AsyncSGD(0.5, reference_batch_size=32), [1e34]),
    "mean squares alone": (lambda: AsyncSGD(optimizer="adam"), [1e30]),
    "compensation": (lambda: DelayCompensated(0.5, 1.0, 3), [1e20]),
    "compensation by mean squares": (lambda: DelayCompensated(0.5, 1.0, 3, decay=0.9), [1e20]),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_pushes_leave_center_and_state_finite(name):
    make_rule, changes = TOO_LARGE[name]
    part, samples = part_with(make_rule()), LARGEST_SAMPLES - 1
    for change in ([1, 2, 3], *([value, 0, 0] for value in changes[:-1])):
        assert push(part, change).status == Status.OK
    before = found(part)
    answer = push(part, [changes[-1], 0, 0], samples=samples)
    assert answer.status == Status.NOT_FINITE and answer.values is None
    np.testing.assert_equal(found(part), before)
    assert all(np.isfinite(value).all() for value in before.values())
    assert push(part, [1, 2, 3]).status == Status.OK


def test_all_that_stays_finite_is_taken():
    part, random, refused = part_with(), np.random.default_rng(0), 0
    for _ in range(300):
        size = random.choice([1.0, 1e10, 1e19, 0.5 * LARGEST])
        change = (size * random.uniform(-1, 1, SIZE)).astype(np.float32)
        with np.errstate(over="ignore"):
            wanted = part.center + change
        before, version, is_taken = part.center, part.version, is_finite(wanted)
        assert push(part, change).status == (Status.OK if is_taken else Status.NOT_FINITE)
        np.testing.assert_array_equal(part.center, wanted if is_taken else before)
        assert part.version == version + is_taken
        refused += not is_taken
    assert 20 < refused < 200


class Smallest(Delta):
    name = "smallest"

    def create_slots(self, center):
        return {"least": np.full(len(center), np.inf, np.float32)}

    def update(self, center, slots, change, meta):
        least = slots["least"].copy()
        least[0] = min(least[0], change[0])
        return super().update(center, slots, change, meta)._replace(slots={"least": least})


def test_a_rule_may_keep_what_is_not_finite():
    part = part_with(Smallest())
    for _ in range(2):
        assert push(part).status == Status.OK
    other = Part(SIZE, Smallest(), 3)
    other.set_state(part.state())
    np.testing.assert_array_equal(other.slots["least"], [1, np.inf, np.inf])


@each_rule
def test_what_is_given_and_answered_stays_as_it_is(logical_devices, case):
    """Answers are not copied, and travel while others push."""
    part, random = part_with(make_rule(case), center=0.5), np.random.default_rng(0)
    given = np.full(SIZE, 0.25, np.float32)
    part.set_center(given)
    kept = [given, *part.state().values()]
    copies = [value.copy() for value in kept]
    for turn in range(9):
        change = random.normal(size=SIZE).astype(np.float32)
        answer = push(part, change, worker=turn % 3, version=part.version)
        assert answer.status == Status.OK
        kept += [change, answer.values, part.pull().values]
        copies += [value.copy() for value in kept[-3:]]
    np.testing.assert_equal(kept, copies)
    assert part.version == 9


class Noted(Delta):
    def update(self, center, slots, change, meta):
        self.told = meta
        return super().update(center, slots, change, meta)


def test_what_a_rule_learns_about_a_push():
    part = part_with(rule := Noted())
    for version in range(5):
        push(part, version=version)
    push(part, worker=2, version=2, samples=8)
    assert rule.told == PushMeta(worker=2, samples=8.0, staleness=3, version=5)
    push(part, version=9)  # of a service that was lost
    assert rule.told == PushMeta(worker=0, samples=1.0, staleness=0, version=6)


def in_threads(work, number):
    """Call a function with each number at the same time; return once all calls have ended."""
    begins, pool = threading.Barrier(number), ThreadPoolExecutor(number)
    calls = [pool.submit(lambda own: (begins.wait(SECONDS), work(own)), i) for i in range(number)]
    pool.shutdown(wait=False)
    for call in calls:
        call.result(SECONDS)


@pytest.mark.parametrize("make", [Delta, lambda: HogwildEASGD(0.3)], ids=["locked", "hogwild"])
def test_pushes_of_many_threads_are_all_counted(make):
    part = part_with(make(), num_workers=8)

    def work(worker):
        for number in range(1, 51):
            assert push(part, worker=worker, number=number).status == Status.OK

    in_threads(work, 8)
    assert (part.version, part.latest.tolist()) == (400, [50] * 8)
    if make is Delta:
        np.testing.assert_array_equal(part.center, 400)
    else:  # some are lost, none brings the center where nobody pulls it
        assert (part.center > 0).all() and (part.center <= 1).all()


def waiting(part, *workers, **options):
    calls = [push(part, worker=worker, **options) for worker in workers]
    assert not any(call.done() for call in calls)
    return calls


@pytest.fixture
def in_turns():
    return part_with(RoundRobinEASGD(3, 0.5))


def test_a_push_is_answered_when_its_turn_comes(in_turns):
    part = in_turns
    second, third = waiting(part, 2, 1)[::-1]
    assert part.version == 0
    first = push(part, worker=0)  # this very push
    assert first.status == Status.OK
    for version, (call, center) in enumerate([(second, 0.5), (third, 0.75)], 2):
        answer = call.result(0)
        assert (answer.status, answer.version) == (Status.OK, version)
        np.testing.assert_allclose(answer.values, center)  # each with the center before it
    np.testing.assert_allclose(part.center, 1 - 0.5**3)
    assert push(part, worker=0).status == Status.OK


def test_nobody_waits_for_a_worker_that_leaves(in_turns):
    calls = waiting(in_turns, 1, 2)
    assert not calls[0].done()
    in_turns.leave(0)
    assert [call.result(0).status for call in calls] == [Status.OK] * 2
    assert push(in_turns, worker=1).status == Status.OK  # without the one that is gone
    (back,) = waiting(in_turns, 0)  # it is back: its turn comes
    assert push(in_turns, worker=2).status == Status.OK and back.result(0).status == Status.OK


BAD = [np.nan] * SIZE


def statuses(part, *pushes, **options):
    """What pushes of some workers are answered, one after another; None while one waits."""
    answers = [push(part, change, worker, **options) for worker, change in pushes]
    return [None if isinstance(answer, Future) else answer.status for answer in answers]


@pytest.mark.parametrize("bad", [BAD, [3e38] * SIZE, [3e38, 0, 0]])
def test_a_refused_push_passes_the_turn_on(bad):
    """The last one is refused with what the center is."""
    is_known_later = bad == [3e38, 0, 0]
    part = part_with(RoundRobinEASGD(3, 0.3), center=[-3e38 * is_known_later, 0, 0])
    before, zeros = part.center, np.zeros(SIZE)
    if not is_known_later:  # it is not its turn
        assert statuses(part, (1, bad), (1, zeros)) == [Status.NOT_FINITE, None]
    assert statuses(part, (0, bad)) == [Status.NOT_FINITE]
    if is_known_later:
        assert part.version == 0 and part.center is before
        assert statuses(part, (1, zeros)) == [Status.OK]
    assert statuses(part, (0, zeros), (2, zeros)) == [None, Status.OK]
    assert part.version == 3


def test_a_refused_push_that_is_sent_again_passes_no_second_turn(in_turns):
    assert statuses(in_turns, (0, BAD), number=1) == [Status.NOT_FINITE]
    assert statuses(in_turns, (1, ONES), (2, ONES)) == [Status.OK] * 2
    assert statuses(in_turns, (0, BAD), number=1) == [Status.NOT_FINITE]
    assert statuses(in_turns, (1, ONES)) == [None]
    assert statuses(in_turns, (0, ONES), number=2) == [Status.OK]
    assert in_turns.version == 4


def test_a_worker_that_has_left_does_not_come_back_with_a_refused_push(in_turns):
    in_turns.leave(1)
    assert statuses(in_turns, (0, ONES), (1, BAD)) == [Status.OK, Status.NOT_FINITE]
    assert statuses(in_turns, (2, ONES), (0, ONES), (2, ONES)) == [Status.OK] * 3


class FailsForOne(RoundRobinEASGD):
    def update(self, center, slots, change, meta):
        if meta.worker == 1:
            raise MemoryError("none left")
        return super().update(center, slots, change, meta)


def test_an_error_is_that_of_the_push_that_it_concerns():
    part = part_with(FailsForOne(3, alpha=0.5))
    (waits,) = waiting(part, 1)
    assert push(part, number=1).status == Status.OK
    with pytest.raises(MemoryError, match="none left"):
        waits.result(0)


def test_a_push_that_is_sent_again_while_it_waits_takes_the_place_of_the_first(in_turns):
    (lost,) = waiting(in_turns, 1, number=1)
    was_locked = []  # an answer is sent from there
    lost.add_done_callback(lambda _: was_locked.append(in_turns._lock.locked()))
    (again,) = waiting(in_turns, 1, number=1)
    assert was_locked == [False]
    with pytest.raises(ConnectionError, match="sent again"):
        lost.result(0)
    push(in_turns, worker=0)
    assert again.result(0).status == Status.OK and in_turns.version == 2


def test_a_wait_that_is_over_ends_at_once():
    part = part_with(RoundRobinEASGD(3, 0.5), max_staleness=0)
    (stale,) = waiting(part, 1)
    assert push(part, worker=0).status == Status.OK
    assert (stale.result(0).status, stale.result(0).version) == (Status.STALE, 1)
    (closed,) = waiting(part, 2, version=1)
    part.close()
    assert closed.result(0).status == Status.CLOSED and part.version == 1


def test_after_the_end_no_push_is_taken():
    part = part_with()
    assert push(part, number=1).status == Status.OK
    part.close()
    assert push(part, number=1).status == Status.REPEATED  # its answer might have been lost
    for number in (0, 2):
        answer = push(part, number=number)
        assert (answer.status, answer.values) == (Status.CLOSED, None)
    np.testing.assert_array_equal(part.pull().values, 1)
    assert part.version == 1


class Unhurried(HogwildEASGD):
    """Takes pushes without a lock, and only when it may."""

    name = "unhurried"

    def __init__(self):
        super().__init__(0.5)
        self.entered, self.may_go = threading.Semaphore(0), threading.Semaphore(0)

    def update(self, center, slots, change, meta):
        self.entered.release()
        assert self.may_go.acquire(timeout=SECONDS)
        return super().update(center, slots, change, meta)


def test_the_center_is_final_when_training_was_closed_without_a_lock_too():
    rule = Unhurried()
    part, statuses, centers = part_with(rule), [], []
    is_asked, idle = threading.Event(), part._idle
    wait_for, idle.wait_for = idle.wait_for, lambda *given: (is_asked.set(), wait_for(*given))

    def work(worker):
        if worker < 2:
            statuses.append(push(part, worker=worker).status)
            return
        for _ in range(2):  # both at the same time
            assert rule.entered.acquire(timeout=SECONDS)
        closing = threading.Thread(target=lambda: (part.close(), centers.append(found(part))))
        closing.start()
        assert is_asked.wait(SECONDS) and not centers
        rule.may_go.release(2)
        closing.join(SECONDS)

    in_threads(work, 3)
    assert statuses == [Status.OK] * 2
    assert push(part).status == Status.CLOSED
    np.testing.assert_equal(centers, [found(part)])
    assert part.center.max() > 0


@each_rule
def test_state_comes_back(logical_devices, case):
    """All of it is in the part: two of the same rule do not touch each other."""
    rule, random = make_rule(case), np.random.default_rng(0)
    first, *others = (part_with(rule), *(Part(SIZE, own, 3) for own in (rule, make_rule(case))))

    def go_on(*parts):
        for worker in (0, 1, 2):
            change = random.normal(size=SIZE).astype(np.float32)
            seen = max(first.version - 1, 0)
            answers = [push(part, change, worker, version=seen) for part in parts]
            assert {answer.status for answer in answers} == {Status.OK}

    go_on(first)
    for other in others:
        other.set_state(unpack_state(*pack_state(first.state())))
        other.set_center(np.array(first.center))
    for _ in range(2):  # and they continue alike
        for other in others:
            np.testing.assert_equal(found(other) | {"latest": 0}, found(first) | {"latest": 0})
        go_on(first, *others)


@pytest.mark.parametrize(
    "other",
    [
        Part(SIZE, DelayCompensated(0.1, 1.0, num_workers=2), 2),
        Part(SIZE + 1, DelayCompensated(0.1, 1.0, num_workers=3), 3),
        Part(SIZE, AsyncSGD(0.1), 3),
        Part(SIZE, Delta(), 3),
    ],
    ids=["workers", "size", "rule", "no state"],
)
def test_state_of_another_part_is_refused(other):
    part = part_with(DelayCompensated(0.1, 1.0, num_workers=3))
    push(part)
    for one, two in ((part, other), (other, part)):
        before = found(one)
        with pytest.raises(ValueError, match="another rule, size or number of workers"):
            one.set_state(two.state())
        np.testing.assert_equal(found(one), before)


@pytest.mark.parametrize(
    ("name", "value"),
    [("momentum", np.nan), ("momentum", -np.inf), ("version", -5), ("version", 2**63 - 1)],
)
def test_state_with_which_no_push_could_be_taken_is_refused(name, value):
    part = part_with(AsyncSGD(0.1, momentum=0.5))
    before, state = found(part), part.state()
    broken = np.full_like(state[name], value)
    with pytest.raises(ValueError, match="must be finite, and its versions at least 0"):
        part.set_state({**state, name: broken})
    np.testing.assert_equal(found(part), before)


def other_arrays():
    """What one array of a state may not be: of another type or shape, or not finite."""
    yield from (np.full(SIZE, odd, np.float32) for odd in (np.nan, np.inf))
    yield from (np.zeros(shape, np.float32) for shape in ((), (0,), (SIZE + 1,), (SIZE, 1)))
    yield from (np.zeros(SIZE, kind) for kind in ("<f8", ">f4", "<i4", "c8", "U3", "S4"))
    yield from (np.asarray(odd, np.int64) for odd in (-1, 2**62, -(2**63)))
    yield np.array([None, {"a": 1}], object)


@pytest.mark.quick("1000")
@pytest.mark.parametrize("rounds", [1000, 50_000])
def test_a_state_that_is_none_is_an_error_and_changes_nothing(rounds):
    part, random = part_with(AsyncSGD(0.1, momentum=0.5)), np.random.default_rng(0)
    push(part)
    before, (good, _) = found(part), pack_state(part.state())
    files = [
        np.frombuffer(text, np.uint8) for text in (b"", b"PK", b"\xff\xfe", b"\x93NUMPY\x01\x00")
    ]
    for name in part.state():
        files += [pack_state(part.state() | {name: odd})[0] for odd in other_arrays()]
        files.append(pack_state({n: array for n, array in part.state().items() if n != name})[0])
    files.append(pack_state(part.state() | {"another": ONES})[0])
    num_refused = 0
    for turn in range(rounds):
        content = np.array(files[turn] if turn < len(files) else good)
        if turn >= len(files):  # a damaged file
            content = content[: random.choice([len(good), random.integers(len(good))])]
            places = random.integers(max(len(content), 1), size=random.choice([0, 1, 4]))
            content[places[: len(content)]] = random.integers(256)
        try:
            part.set_state(unpack_state(content))
        except ValueError as error:
            assert "Received" in str(error)
            num_refused += 1
        np.testing.assert_equal(found(part), before)  # or a change is in what nobody reads
        assert num_refused > turn or turn >= len(files)
    assert num_refused > rounds / 2
    part.set_state(unpack_state(good))
