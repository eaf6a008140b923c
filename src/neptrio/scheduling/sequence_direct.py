"""The direct strategy: a sequence's slot is its place in the batch.

The model may keep state by position in the batch, so slot N's request is always the Nth of its batch. Slots
without a request below the highest one with a request are filled with null requests.

Rules (docs/protocol/rules.md E1.9 and E1.10):
 1. One batch per instance is under way; the next is formed after that has left the instance.
 2. A batch reaches from slot 0 to the highest slot that has a request.
 3. A request whose inputs differ in shape from the first one's waits; its slot gets a null request.
 4. Without a delay or a minimum utilization a batch is sent at once. With both, it waits until the share of
    slots with a request reaches the minimum or the oldest request has waited for the delay.
 5. With a rate limiter a batch is made of what is there when it is granted (sequence.ask).
"""

from __future__ import annotations

from neptrio.config.sequence_config import SequenceConfig
from neptrio.execution.instance import Instance, InstancePool
from neptrio.request.infer_request import InferRequest
from neptrio.scheduling.base import LoopServices, ServedModel
from neptrio.scheduling.sequence import QUEUE_START, SequenceScheduler
from neptrio.scheduling.sequence_slots import Sequence
from neptrio.scheduling.sequence_tensors import NullRequests, same_inputs


def delay_left(delay_ns: int, utilization: float, slots: int, ready: int, oldest_ns: int, now_ns: int) -> int:
    """Nanoseconds that a batch of `ready` requests still has to wait, the oldest having arrived at `oldest_ns`.

    `utilization` is meant as the decimal number that the configuration shows: 0.3 of 10 slots are 3, although
    neither the 32-bit 0.3 of the message nor 0.3 * 10 is exact.
    """
    if delay_ns == 0 or utilization == 0.0 or ready / slots >= utilization:
        return 0
    return max(0, oldest_ns + delay_ns - now_ns)


class DirectScheduler(SequenceScheduler):
    """Forms batches by the rules on top of this module."""

    def __init__(
        self, model: ServedModel, pool: InstancePool, loop: LoopServices, config: SequenceConfig
    ) -> None:
        super().__init__(model, pool, loop, config)
        self._nulls = NullRequests(model, self.controls)

    def form(self, index: int, instance: Instance, now_ns: int) -> bool:
        if instance.outstanding:
            return False
        table = self.table
        if self._holds[index] and self._held(index, sum(table.waiting), table.backlog_requests):
            return False
        self._holds = [0] * len(self._holds)  # they count the same requests, of which others are executed now
        while True:
            ready, oldest = self._due_now(index, now_ns)
            if not ready:
                return False
            if instance.claim is None or instance.claim.granted:
                break
            if not self.ask(instance.claim):
                return True  # once granted, it is looked at again: who was ready may have gone
        first = ready[0]
        assert first.waiting is not None
        pattern: InferRequest = first.waiting[0]
        like = list(pattern.inputs)
        batch: list[InferRequest | Sequence] = []
        for sequence in ready:
            assert sequence.waiting is not None
            if sequence is not first and not same_inputs(pattern, sequence.waiting[0], self.config.ragged):
                continue  # a null request fills its slot below, or it is beyond the batch's end
            while len(batch) < sequence.slot:
                batch.append(self._nulls.make(like, self.state.initial))
            batch.append(sequence)
        self.null_requests = self._nulls.made
        requests = [self._issue(r, now_ns) if not isinstance(r, InferRequest) else r for r in batch]
        reason = "full" if len(ready) == self.config.slots else "delay" if self.delay_ns else "idle"
        instance.submit(requests, reason, now_ns - oldest)
        return False

    def _due_now(self, index: int, now_ns: int) -> tuple[list[Sequence], int]:
        """The sequences for a batch that is due, by slot, and when the first of their requests came; ([], 0) if none is, and
        then dispatch() is called when one will be."""
        ready = [s for s in self.table.slots[index] if s is not None and s.waiting and s.in_flight is None]
        if not ready:
            return [], 0
        oldest = min(s.waiting[0].timestamp(QUEUE_START) for s in ready if s.waiting)
        config = self.config
        utilization = config.minimum_slot_utilization
        left = delay_left(self.delay_ns, utilization, config.slots, len(ready), oldest, now_ns)
        if left:
            self._wait_until(now_ns + left)
            return [], 0
        return ready, oldest

    @property
    def null_requests_open(self) -> int:  # type: ignore[override]
        """Null requests in batches under way."""
        return self._nulls.open
