"""The life of a sequence as one table: what may happen to it in which state, and what follows.

States of a sequence:

    WAITING        in the backlog; its id is live
    WAITING_ENDED  in the backlog; its END is queued, so its id is free again
    ACTIVE         holds a slot; its id is live
    ENDING         holds a slot until its accepted requests have run; its id is free again
    GONE           forgotten

An action is a method of SlotTable (sequence_slots.py) with an underscore in front; the rules that the
rows follow are there.
"""

from __future__ import annotations

WAITING, WAITING_ENDED, ACTIVE, ENDING, GONE = range(5)
STATE_NAMES = ("WAITING", "WAITING_ENDED", "ACTIVE", "ENDING", "GONE")

REQUEST, END, SLOT, ISSUE, FINISH, CANCEL, TIMEOUT, IDLE, EVICT, DISCONNECT, CLOSE, EMPTY = range(12)
EVENT_NAMES = (
    "REQUEST",
    "END",
    "SLOT",
    "ISSUE",
    "FINISH",
    "CANCEL",
    "TIMEOUT",
    "IDLE",
    "EVICT",
    "DISCONNECT",
    "CLOSE",
    "EMPTY",
)

# (state, event) -> (next state, actions in order). What is not listed cannot happen.
TRANSITIONS: dict[tuple[int, int], tuple[int, tuple[str, ...]]] = {
    (WAITING, REQUEST): (WAITING, ("queue", "note_timeout")),
    (WAITING, END): (WAITING_ENDED, ("queue", "note_timeout", "unmap")),
    (WAITING, SLOT): (ACTIVE, ("occupy", "start_idle")),
    (WAITING, CANCEL): (GONE, ("unmap", "leave_backlog", "cancel_waiting")),
    (WAITING, TIMEOUT): (GONE, ("unmap", "leave_backlog", "reject_waiting")),
    (WAITING, EVICT): (WAITING_ENDED, ("unmap",)),
    (WAITING, DISCONNECT): (GONE, ("unmap", "leave_backlog", "cancel_waiting")),
    (WAITING, CLOSE): (WAITING_ENDED, ("unmap",)),
    (WAITING_ENDED, SLOT): (ENDING, ("occupy",)),
    (WAITING_ENDED, CANCEL): (GONE, ("leave_backlog", "cancel_waiting")),
    (WAITING_ENDED, TIMEOUT): (GONE, ("leave_backlog", "reject_waiting")),
    (ACTIVE, REQUEST): (ACTIVE, ("queue", "touch", "offer")),
    (ACTIVE, END): (ENDING, ("queue", "unmap", "stop_idle", "offer")),
    (ACTIVE, ISSUE): (ACTIVE, ("take",)),
    (ACTIVE, FINISH): (ACTIVE, ("land", "offer")),
    (ACTIVE, CANCEL): (ENDING, ("unmap", "stop_idle", "cancel_waiting", "settle")),
    (ACTIVE, IDLE): (ENDING, ("unmap", "stop_idle", "settle")),
    (ACTIVE, EVICT): (ENDING, ("unmap", "stop_idle", "settle")),
    (ACTIVE, DISCONNECT): (ENDING, ("unmap", "stop_idle", "settle")),
    (ACTIVE, CLOSE): (ENDING, ("unmap", "stop_idle", "settle")),
    (ENDING, ISSUE): (ENDING, ("take",)),
    (ENDING, FINISH): (ENDING, ("land", "offer", "settle")),
    (ENDING, CANCEL): (ENDING, ("cancel_waiting", "settle")),
    (ENDING, EMPTY): (GONE, ("release",)),
}

# why a sequence ended, by the event that ended it
REASONS = {
    END: "ended",
    IDLE: "idle",
    CANCEL: "cancelled",
    TIMEOUT: "cancelled",
    DISCONNECT: "cancelled",
    EVICT: "evicted",
    CLOSE: "unloaded",
}
