"""Loads models when they are asked for (--model-control-mode=on-demand, and the parameter `load` in mode explicit).

The problem: thousands of models, of which few are used at a time. A request for one that is not loaded has to wait for it
on every way in, share the load with others that want the same model, and learn why it cannot be had. The choice: at the start
the folders are listed and their configurations read, and what is needed of each is kept. Admission, through which every
request passes, asks here for a stand-in where no model serves, and parks the request with it; loads themselves are those of
repository.loads, which tells here what becomes of them. repository.known_models has the models, repository.demand_states their
states, repository.waiting the requests.

Rules:
 1. The first request for a model begins its load; all others until then wait for the same one.
 2. Who waits has no part in the load: it goes on when they leave.
 3. A load by hand, of an ensemble's step, or one that follows an unload counts as any other.
 4. Once a model serves, those who waited are submitted before anything else can be.
 5. A request for a version that is loaded, but whose process has ended and could not be started again at once, waits like any
    other, until that version is ready, and so does one that was accepted before and that no instance could begin. One for a version that is not loaded, of a model that is, is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import trio

from neptrio.config import version_labels
from neptrio.errors import TritonError, Unavailable
from neptrio.execution.admission import Admission
from neptrio.foreign import text_of
from neptrio.limits import shown
from neptrio.observe.counters import ModelCounters
from neptrio.repository.demand_states import Act, Event, State
from neptrio.repository.known_models import Ended, Known, KnownModels
from neptrio.repository.load_line import LAST, NO_PRIORITY, Rank
from neptrio.repository.override import LoadParameters
from neptrio.repository.waiting import NoRoom, Room, StandIn, later
from neptrio.request.infer_request import InferRequest, InputSpec, monotonic_ns
from neptrio.scheduling.base import LoopServices
from neptrio.settings import Settings

if TYPE_CHECKING:
    from neptrio.repository.catalog import Catalog
    from neptrio.repository.model import Model
    from neptrio.repository.records import Operation

# the error of a request that waits again, where it may be answered only once
REPLACED = "the model was replaced by one with decoupled transaction policy while the request waited for it"


class Demand(KnownModels):
    """Brings requests and the models that are loaded on demand together. Trio thread only, but for read()."""

    def __init__(
        self, settings: Settings, catalog: Catalog, loop: LoopServices, begin: Callable[..., Operation]
    ) -> None:
        """`begin` begins a load (Loading.begin)."""
        super().__init__(settings, catalog)
        self._loop = loop
        self._begin = begin
        self._submit: Callable[[InferRequest], None] = _nobody
        self._counters = ModelCounters()

    def serve(self, admission: Admission) -> None:
        """From now on requests come here that find no model."""
        self._submit = admission.submit
        admission.wait_with(self)

    # ------------------------------------------------------------ requests

    def absent(self, name: str, version: str, one_response: str | None) -> StandIn | None:
        """What stands in for a model that does not serve; None for one that is not loaded on demand. Raises Unavailable where
        its last load has just failed, and TritonError for a label that it does not have."""
        known = self.away(name)
        if known is None:
            return None
        name = known.name
        if version_labels.is_label(version):
            self._catalog.number(name, version)
        self._check(known, version)
        return self._stand_in(known, version, one_response)

    def unready(self, name: str, version: str, one_response: str | None) -> StandIn | None:
        """What stands in for a version that is loaded and cannot take requests now (rule 5); None for any other."""
        known = self._unready(name, version)
        if known is None:
            return None
        self._check(known, version)
        stand_in = self._stand_in(known, version, one_response)
        model = self._broken(known.name, version)
        if model is not None:  # what is loaded counts, whatever its folder says by now
            stand_in.decoupled, stand_in.max_batch_size = model.decoupled, model.max_batch_size
            stand_in.set_inputs(model.input_specs)
        return stand_in

    def _unready(self, name: str, version: str) -> Known | None:
        known = self.known.get(name) or self.known.get(self._catalog.own_name(name))
        return None if known is None or self._broken(known.name, version) is None else known

    def _broken(self, name: str, version: str) -> Model | None:
        """The version of a model, by its own name, that a request names, if it is loaded and cannot take requests now."""
        if version:
            try:
                number = self._catalog.number(name, version)
            except TritonError:  # whoever looks it up says what is wrong
                return None
            record = self._catalog.records.get(name)
            row = None if record is None else record.rows.get(number)
            model = None if row is None else row.model
        else:
            model = self._catalog.latest.get(name)
        return None if model is None or model.ready else model

    def _stand_in(self, known: Known, version: str, one_response: str | None) -> StandIn:
        name, room = known.name, known.room
        if room is None:
            longest = int(self._settings.load_wait_secs * 1e9)
            room = known.room = Room(name, self._loop.timers, self._counters, longest)
            room.why_not = lambda: self._doing(name)
        stand_in = StandIn(name, version, one_response, room, lambda: self._parked(known))
        signature = known.signature
        if signature is not None:
            stand_in.decoupled = signature.decoupled
            stand_in.max_batch_size = signature.max_batch_size
            stand_in.set_inputs([InputSpec(*one) for one in signature.inputs])
        return stand_in

    def _check(self, known: Known, version: str) -> None:
        """Raises Unavailable for a model that needs a load and whose back-off has not passed."""
        now, standing = monotonic_ns(), known.standing
        put_off = now < standing.retry_ns and self._lost(known) and self._is_lost(known.name, version)
        if put_off or standing.act(now) is Act.REFUSE:
            seconds = (standing.retry_ns - now) / 1e9
            raise later(
                f"model '{shown(known.name)}' is loaded on demand and could not be loaded: {standing.why}; it is "
                f"tried again in {seconds:.1f} s",
                seconds,
            )

    def _doing(self, name: str) -> str:
        record = self._catalog.records.get(name)
        if record is not None and record.operations:
            return record.operations[0].phase
        model = self._catalog.latest.get(name)
        return "" if model is None else model.reason

    def _parked(self, known: Known) -> None:
        """A request waits for the model from now on."""
        known.misses += 1
        self._ask(known)

    def take_back(self, name: str, request: InferRequest) -> bool:
        """Has a request wait that the model has accepted and that no instance could begin (rule 5), and those that wait for its
        answer. False for a model that is not loaded on demand, or would not be now."""
        known = self.known.get(name)
        if known is None or known.standing.act(monotonic_ns()) is Act.REFUSE:
            return False
        version = request.model_version
        for one in request.model.scheduler.give_back(request):
            stand_in = self._stand_in(known, one.model_version, None if one.model.decoupled else REPLACED)
            stand_in.scheduler.take_back(one, stand_in)
            known.released -= 1  # it counts as it did when it went to the model, and goes there again
        self._ask(known)
        if name in self._catalog.latest and self._broken(name, version) is None:  # another load serves
            self._release(known)
        return True

    def _ask(self, known: Known) -> None:
        """Begins a load if none is under way, and none serves that can be started again. Must not raise."""
        now = monotonic_ns()
        act = known.standing.act(now)
        if act is Act.SERVE and now >= known.standing.retry_ns and self._lost(known):
            act = Act.LOAD
        if act is not Act.LOAD:
            return
        try:
            self._begin(known.name, LoadParameters(), explicit=False)
        except TritonError as error:  # the server exits
            self._refuse(known, lambda text=text_of(error): Unavailable(text))  # type: ignore[misc]

    def _lost(self, known: Known) -> bool:
        """Whether the model has stopped serving until a load makes it anew, and none does."""
        record = self._catalog.records.get(known.name)
        return record is not None and not record.operations and any(m.lost for m in record.serving.values())

    def present(self, name: str, version: str, infers: bool = True) -> Callable[[], Awaitable[None]] | None:
        """What to call and await until a model serves; None for one that is not loaded on demand. `infers`: a request to the
        model follows."""
        known = self.away(name) or (self._unready(name, version) if infers else None)
        return None if known is None else functools.partial(self._present, known, version, infers)

    async def _present(self, known: Known, version: str, infers: bool) -> None:
        """Loads the model unless it serves, and waits for a version that is loaded and not ready. Raises Unavailable when that fails or takes longer than --load-wait-secs."""
        known.misses += 1
        with trio.move_on_after(self._settings.load_wait_secs) as scope:
            while known.name not in self._catalog.latest or (infers and self._broken(known.name, version)):
                self._check(known, version)
                if known.ended is None:
                    known.ended = Ended()
                ended = known.ended
                self._ask(known)
                if known.standing.state not in (State.LOADING, State.READY):  # it could not even begin
                    raise Unavailable("Server exiting")
                await ended.event.wait()
                gone = known.name not in self._catalog.latest or self._is_lost(known.name, version)
                if ended.refusal and gone:
                    raise NoRoom(ended.refusal)
        if scope.cancelled_caught:
            why = self._doing(known.name)
            raise later(
                f"model '{shown(known.name)}' is loaded on demand and was not loaded within --load-wait-secs, "
                f"{self._settings.load_wait_secs:g} s{f': {why}' if why else ''}",
                5,
            )
        known.released += infers

    # ------------------------------------------------------------ what becomes of loads

    def begun(self, name: str) -> None:
        """A load of a model begins or waits for its turn."""
        known = self.known.get(name)
        if known is not None:
            known.standing.apply(Event.BEGIN, 0)

    def loaded(self, name: str) -> None:
        """A load is done: the model serves. Called before anything else can happen (rule 4)."""
        known = self.known.get(name)
        if known is None:
            return
        known.standing.apply(Event.LOADED, 0)
        known.loads += 1
        self._release(known)

    def recovered(self, name: str) -> None:
        """The health of a version that serves has changed."""
        if name in self._catalog.latest and self.asked_for(name):
            self._release(self.known[name])

    def _release(self, known: Known) -> None:
        """The model serves: who waits goes to it, unless the version that he wants is not ready."""
        name, room = known.name, known.room
        released = 0
        if room is not None:
            released = room.release(self._submit, lambda version: self._broken(name, version) is None)
            self._leave(known, room)
        if released:
            known.released += released
            self._loop.loop_pass.soon()
        self._tell(known)

    def failed(self, name: str, error: TritonError, outdated: bool, exiting: bool) -> None:
        """The last load under way has ended without a model. `outdated`: a newer operation has ended it, so those who wait
        begin another one."""
        known = self.known.get(name)
        if known is None:
            return
        why = str(error).rstrip("\n")
        no_room = isinstance(error, NoRoom)  # which is not the model's fault
        event = Event.OUTDATE if outdated or no_room else Event.FAIL
        known.standing.apply(event, monotonic_ns(), "" if outdated else why)
        if not outdated:
            known.load_failures += 1
        if name in self._catalog.latest:  # a reload has failed: nothing else makes lost versions anew
            if self._lost(known):
                seconds = 5.0
                if event is Event.FAIL:
                    seconds = known.standing.put_off(monotonic_ns(), why) / 1e9
                self._refuse(known, lambda: later(why, seconds), lambda version: self._is_lost(name, version))
                if known.ended is not None:
                    known.ended.refusal = why
                self._tell(known)
            return
        if exiting:
            self._refuse(known, lambda: Unavailable(why))
        elif no_room:
            if known.ended is not None:
                known.ended.refusal = why
            self._refuse(known, lambda: NoRoom(why))
        elif outdated:
            if known.room is not None and len(known.room):
                self._ask(known)
        else:
            text = f"model '{shown(name)}' is loaded on demand and could not be loaded: {why}"
            seconds = max(0.0, (known.standing.retry_ns - monotonic_ns()) / 1e9)
            self._refuse(known, lambda: later(text, seconds))
        self._tell(known)

    def withdrawn(self, name: str, why: str) -> None:
        """The model was taken out of service."""
        known = self.known.get(name)
        if known is not None:
            known.standing.apply(Event.WITHDRAW, 0, why)
            self._tell_names(known)  # its next load is one of what its folder says
            if self.asked_for(name) and self._catalog.nursery is not None:  # who waited for its process
                self._catalog.nursery.start_soon(self._ask_again, known)

    async def _ask_again(self, known: Known) -> None:
        if self.asked_for(known.name):
            self._ask(known)

    def _is_lost(self, name: str, version: str) -> bool:
        model = self._broken(name, version)
        return model is not None and model.lost

    def _refuse(
        self,
        known: Known,
        error: Callable[[], TritonError],
        which: Callable[[str], bool] = lambda version: True,
    ) -> None:
        room = known.room
        if room is not None:
            if room.fail(error, which):
                self._loop.loop_pass.soon()
            self._leave(known, room)

    def _leave(self, known: Known, room: Room) -> None:
        """An empty room is not kept: there may be thousands of models."""
        if known.room is room and not room:
            known.room = None

    def _tell(self, known: Known) -> None:
        ended, known.ended = known.ended, None
        if ended is not None:
            ended.event.set()

    # ------------------------------------------------------------ what is seen

    def away(self, name: str) -> Known | None:
        """The model of that name if it is loaded on demand and does not serve. An alias is a name, too."""
        known = self.known.get(name) or self.known.get(self._catalog.own_name(name))
        return None if known is None or known.name in self._catalog.latest else known

    def asked_for(self, name: str) -> bool:
        """Whether somebody waits for the model."""
        known = self.known.get(name)
        return known is not None and (bool(known.room) or known.ended is not None)

    def rank(self, name: str) -> Rank:
        """How urgently the model is waited for (repository.load_line)."""
        known = self.known.get(name)
        if known is not None and known.room:
            return known.room.priority or NO_PRIORITY, known.room.oldest_ns
        return NO_PRIORITY if self.asked_for(name) else LAST, 0

    def rows(self, name: str) -> list[dict[str, Any]] | None:
        """The rows of the repository index of a model that waits to be asked for, or whose load has shown no version yet.
        None where its record has rows that say more."""
        known = self.away(name)
        if known is None:
            return None
        state = known.standing.state
        record = self._catalog.records.get(name)
        if state is State.FAILED or (state is State.LOADING and record is not None and record.rows):
            return None
        shown_as = {
            "state": "LOADING" if state is State.LOADING else "UNAVAILABLE",
            "reason": known.standing.reason,
        }
        versions = () if known.signature is None else known.signature.versions
        return [{"name": name, "version": str(version), **shown_as} for version in versions] or [
            {"name": name, **shown_as}
        ]

    def will_serve(self, name: str, version: int) -> bool | None:
        """Whether a model that does not serve would after a load, or when its process is started again, of version 0 any;
        None: it serves, or is not loaded on demand."""
        known = self.away(name)
        if known is None:
            known, record = self.known.get(self._catalog.own_name(name)), self._catalog.records.get(name)
            model = (
                self._catalog.latest.get(name)
                if not version or record is None
                else record.serving.get(version)
            )
            if known is None or model is None or model.healthy:
                return None
            return known.standing.ready
        signature = known.signature
        return known.standing.ready and (not version or signature is None or version in signature.versions)

    def would_serve(self, absent: StandIn) -> bool:
        """Whether a request for which that stands in will be served, as far as is known."""
        number = self._catalog.number(absent.name, absent.version) if absent.version else 0
        return self.will_serve(absent.name, number) is not False


def _nobody(*arguments: Any, **options: Any) -> Any:
    raise Unavailable("Server exiting")
