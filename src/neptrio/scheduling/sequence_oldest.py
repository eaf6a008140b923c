"""The oldest strategy: the sequences whose requests have waited longest share a batch.

Rules (docs/protocol/rules.md E1.12 and E2.5):
 1. At most one request of a sequence is under way; the next may be batched after that has left the instance.
 2. Every instance has a queue of its own; a sequence stays with its instance.
 3. The queue is the slot table's list of ready sequences, in the order in which they became ready; it is never
    reordered. A request with other input shapes ends the batch before it.
 4. As many requests as a preferred size asks for are sent at once. With fewer, the batch waits until its oldest
    request has waited for the delay, counted from its arrival. A full or ended batch never waits.
 5. While an instance has all the batches it can work on, one full batch may be prepared for it; anything less
    stays in the queue, where it can still grow.
 6. With a rate limiter a batch is made of what is there when it is granted (sequence.ask).
 7. With preserve_ordering responses leave in the order in which their requests were accepted.
"""

from __future__ import annotations

from neptrio.execution.instance import Instance
from neptrio.request.infer_request import InferRequest
from neptrio.scheduling.ordering import ArrivalOrder
from neptrio.scheduling.sequence import QUEUE_START, SequenceScheduler
from neptrio.scheduling.sequence_slots import Sequence
from neptrio.scheduling.sequence_tensors import same_inputs
from neptrio.scheduling.sequence_transitions import GONE


def choose(
    ready: int, closed: bool, preferred: frozenset[int], age_ns: int, delay_ns: int, max_size: int
) -> tuple[int, str]:
    """(how many of `ready` requests to send now, why); (0, "") means wait.

    `closed`: the next request cannot join them. `age_ns`: how long the oldest request has waited.
    """
    if ready >= max_size:
        return max_size, "full"
    if delay_ns == 0:
        return ready, "idle"
    if age_ns >= delay_ns:
        return ready, "delay"
    best = max((size for size in preferred if size <= ready), default=0)
    if best:
        return best, "preferred"
    return (ready, "shape") if closed else (0, "")


class OldestScheduler(SequenceScheduler):
    """Forms batches by the rules on top of this module."""

    offers = True
    _order: ArrivalOrder | None = None

    def form(self, index: int, instance: Instance, now_ns: int) -> bool:
        config = self.config
        table = self.table
        max_size = max(1, config.max_batch_size)
        if self._holds[index] and self._held(
            index, sum(1 for s in table.ready[index] if s.waiting and s.in_flight is None), self._backlog_hold
        ):
            return False
        capacity = instance.backend.capacity
        limit = capacity - self._pool.limited  # under the rate limiter nothing is prepared in advance
        while instance.outstanding <= limit:
            picked, closed = self._pick(index, max_size)
            if not picked:
                return False
            if instance.outstanding == capacity and len(picked) < max_size:
                return False
            oldest = min(s.waiting[0].timestamp(QUEUE_START) for s in picked if s.waiting)
            age = now_ns - oldest
            size, reason = choose(
                len(picked), closed, config.preferred_batch_sizes, age, self.delay_ns, max_size
            )
            if not size:
                self._wait_until(oldest + self.delay_ns)
                return False
            if instance.claim is not None and not instance.claim.granted:
                if not self.ask(instance.claim):
                    return True
                continue  # who was picked may have gone
            requests = []
            for sequence in picked[:size]:
                table.withdraw(index)
                requests.append(self._issue(sequence, now_ns))
            if config.preserve_ordering:
                self._keep_order(requests)
            instance.submit(requests, reason, age)
        return False

    def _pick(self, index: int, max_size: int) -> tuple[list[Sequence], bool]:
        """The longest prefix of the queue that fits into one batch; removes stale entries from the queue."""
        ready = self.table.ready[index]
        picked: list[Sequence] = []
        pattern: InferRequest | None = None
        stale = False
        closed = False
        for sequence in ready:
            if not sequence.waiting or sequence.in_flight is not None or sequence.state == GONE:
                stale = True
                continue
            request = sequence.waiting[0]
            if pattern is None:
                pattern = request
            elif not same_inputs(pattern, request, self.config.ragged):
                closed = True
                break
            picked.append(sequence)
            if len(picked) == max_size:
                break
        if stale:
            self.table.drop_stale(index)
        return picked, closed

    def _keep_order(self, requests: list[InferRequest]) -> None:
        if self._order is None:
            self._order = ArrivalOrder()
        for request in requests:
            self._order.arrived(request)
