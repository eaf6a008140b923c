"""Grants and resources, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from neptrio.execution.backend import BackendInstance
from neptrio.execution.instance import Instance
from neptrio.execution.rate_limiter import Claim, RateLimiter, ResourceStatistics
from neptrio.loop.mailbox import CompletionQueue
from neptrio.request.infer_request import InferRequest, RequestState
from tests.execution.test_ahead import Nobody, Served
from tests.support.requests import config_of


def limiter_of(explicit: dict[tuple[str, int | None], int] | None = None) -> RateLimiter:
    loop_pass: Any = SimpleNamespace(mark=lambda dispatcher: None)  # the test ends the turns
    return RateLimiter(loop_pass, explicit)


def group(text: str = "") -> Any:
    return config_of(
        f'backend: "identity" instance_group [ {{ rate_limiter {{ {text} }} }} ]'
    ).instance_group[0]


def register(limiter: RateLimiter, text: str = "", device: int = 0) -> Claim:
    return limiter.register(group(text), device, lambda: None)


def run(limiter: RateLimiter, everyone: list[Claim], executions: int) -> list[int]:
    """Everyone always has work and executes in the order of turns; how often each did."""
    counts = [0] * len(everyone)
    for _ in range(executions):
        for one in everyone:
            one.ask()
        limiter.serve()
        granted = [i for i, one in enumerate(everyone) if one.granted]
        assert granted
        for i in granted:
            everyone[i].begin()
            counts[i] += 1
        for i in granted:
            everyone[i].end()
    return counts


ONE = 'resources [ { name: "R" count: 1 } ]'


def test_priority_2_gets_half_the_turns_of_priority_1() -> None:
    limiter = limiter_of()
    everyone = [register(limiter, f"priority: {p} {ONE}") for p in (1, 2)]
    assert run(limiter, everyone, 30) == [20, 10]


def test_priority_0_means_1() -> None:
    limiter = limiter_of()
    everyone = [register(limiter, f"priority: {p} {ONE}") for p in (0, 1)]
    assert run(limiter, everyone, 10) == [5, 5]


def test_without_resources_nobody_waits() -> None:
    limiter = limiter_of()
    assert run(limiter, [register(limiter), register(limiter)], 4) == [4, 4]


def test_there_is_as_much_as_the_most_that_one_instance_asks_for() -> None:
    limiter = limiter_of()
    small = [register(limiter, 'resources [ { name: "R" count: 2 } ]') for _ in range(3)]
    register(limiter, 'resources [ { name: "R" count: 4 } ]')
    for one in small:
        one.ask()
    limiter.serve()
    assert [one.granted for one in small] == [True, True, False]
    assert limiter.statistics().resources == (ResourceStatistics("R", 0, 4, 4),)
    assert limiter.statistics().waiting == 1


def test_the_most_that_one_instance_asks_for_follows_those_that_leave() -> None:
    limiter = limiter_of()

    def counts() -> list[int]:
        return [row.count for row in limiter.statistics().resources]

    small, large, same = (register(limiter, f'resources [ {{ name: "R" count: {n} }} ]') for n in (2, 4, 4))
    assert counts() == [4]
    limiter.unregister(large)
    assert counts() == [4]
    limiter.unregister(same)
    assert counts() == [2]
    limiter.unregister(small)
    assert counts() == []
    register(limiter, ONE)
    assert counts() == [1]


def test_a_new_claim_starts_level_with_the_one_that_had_least() -> None:
    limiter = limiter_of()
    first, second = register(limiter, ONE), register(limiter, f"priority: 2 {ONE}")
    run(limiter, [first, second], 30)
    limiter.unregister(first)
    late = register(limiter, ONE)
    assert late.grants == 20, "the other has had 10 of priority 2"
    assert run(limiter, [late, second], 30) == [20, 10]


class Watched(dict[Any, int]):
    """A claim's needs; counts how often somebody looks at them."""

    looked = 0

    def get(self, *args: Any) -> Any:
        self.looked += 1
        return super().get(*args)

    def items(self) -> Any:
        self.looked += 1
        return super().items()


def test_a_grant_looks_only_at_those_in_line() -> None:
    limiter = limiter_of()
    first, *others = (register(limiter, ONE) for _ in range(20))
    for other in others:
        other.demand = Watched(other.demand)
    assert run(limiter, [first], 10) == [10]
    assert sum(other.demand.looked for other in others) == 0  # type: ignore[attr-defined]


def test_devices_have_their_own_global_ones_are_shared() -> None:
    limiter = limiter_of()
    own = [register(limiter, ONE, device) for device in (0, 1)]
    shared = [register(limiter, 'resources [ { name: "G" global: true count: 1 } ]', d) for d in (0, 1)]
    for one in own + shared:
        one.ask()
    limiter.serve()
    assert [one.granted for one in own + shared] == [True, True, True, False]


def test_nobody_overtakes_the_first_in_line() -> None:
    limiter = limiter_of({("R", None): 2})
    small = [register(limiter, ONE) for _ in range(3)]
    large = register(limiter, 'resources [ { name: "R" count: 2 } ]')
    small[0].ask()
    limiter.serve()
    small[0].begin()
    large.ask()
    small[1].ask()
    limiter.serve()
    assert not large.granted and not small[1].granted, "one unit is free, but the large one is first"
    small[0].end()
    limiter.dispatch(0)
    assert large.granted and not small[1].granted


def test_who_needs_nothing_of_what_others_wait_for_goes_on() -> None:
    limiter = limiter_of()
    holds, first = register(limiter, ONE), register(limiter, ONE)
    second = register(limiter, ONE + 'resources [ { name: "S" count: 1 } ]')
    nothing, other, of_the_second = (
        register(limiter),
        register(limiter, 'resources [ { name: "T" count: 1 } ]'),
        register(limiter, 'resources [ { name: "S" count: 1 } ]'),
    )
    holds.ask()
    limiter.serve()
    holds.begin()
    for claim in (first, second, nothing, other, of_the_second):
        claim.ask()
    limiter.serve()
    assert nothing.granted and other.granted
    # S is free, but the second in line waits for R and S together
    assert not (first.granted or second.granted or of_the_second.granted)
    holds.end()
    limiter.serve()
    assert first.granted and not second.granted and not of_the_second.granted


def test_unused_turns_and_places_go_back() -> None:
    limiter = limiter_of()
    first, second = register(limiter, ONE), register(limiter, ONE)
    first.ask()
    second.ask()
    limiter.serve()
    assert (first.granted, second.granted) == (True, False)
    first.leave()
    limiter.dispatch(0)
    assert (first.granted, second.granted) == (False, True)
    second.leave()
    assert limiter.statistics().waiting == 0 and limiter.statistics().resources[0].used == 0


def test_a_newcomer_does_not_get_every_turn_until_it_has_caught_up() -> None:
    limiter = limiter_of()
    old = register(limiter, ONE)
    run(limiter, [old], 100)
    new = register(limiter, ONE)
    assert run(limiter, [old, new], 10) == [5, 5]


class Idle(BackendInstance):
    """On a thread, which the test does not start: what is submitted stays in the mailbox."""

    def execute(self, batch: Any) -> None:
        raise AssertionError("nothing is executed")


def test_a_batch_that_is_cancelled_before_its_thread_takes_it_gives_its_resources_back() -> None:
    limiter, served = limiter_of(), Served(0)
    completions = CompletionQueue()
    instance = Instance("m_0", served.model, Idle(), completions, served.pool)
    served.pool.add(instance, limiter, group(ONE), 0)
    request = InferRequest()
    request.model, request.responder, request.inputs = served.model, Nobody(), []
    served.model.inflight += 1
    served.scheduler.enqueue(request)
    served.scheduler.dispatch(0)
    assert limiter.statistics().resources == (ResourceStatistics("R", 0, 1, 1),)
    request.cancelled = True
    served.scheduler.cancel(request)
    served.scheduler.dispatch(0)
    assert (request.state, instance.outstanding) == (RequestState.DONE, 0)
    assert limiter.statistics().resources == (ResourceStatistics("R", 0, 1, 0),)


def test_an_instance_that_is_left_behind_while_it_executes_holds_nothing() -> None:
    limiter = limiter_of()
    hangs, other = (register(limiter, ONE) for _ in range(2))
    hangs.ask()
    limiter.serve()
    hangs.begin()
    other.ask()
    limiter.serve()
    assert not other.granted
    limiter.unregister(hangs)
    limiter.serve()
    assert other.granted
    assert limiter.statistics().resources == (ResourceStatistics("R", 0, 1, 1),)
