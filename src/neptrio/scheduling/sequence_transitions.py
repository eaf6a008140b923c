"""The states of a sequence as one table: which event may happen in which state, and what it causes.

States of a sequence:

    WAITING        in the backlog; its id is live
    WAITING_ENDED  in the backlog; its END is queued, so its id is free again
    ACTIVE         holds a slot; its id is live
    ENDING         holds a slot until its accepted requests have run; its id is free again
    GONE           forgotten

An action names a method of SlotTable (sequence_slots.py) without its leading underscore; the rules behind the
rows are on top of that module.
"""

from __future__ import annotations

WAITING, WAITING_ENDED, ACTIVE, ENDING, GONE = range(5)
STATE_NAMES = ("WAITING", "WAITING_ENDED", "ACTIVE", "ENDING", "GONE")

(
    REQUEST,
    END,
    SLOT,
    ISSUE,
    FINISH,
    CANCEL,
    TIMEOUT,
    IDLE,
    EVICT,
    DISCONNECT,
    LOSE,
    CLOSE,
    EMPTY,
) = range(13)
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
    "LOSE",
    "CLOSE",
    "EMPTY",
)

# (state, event) -> (next state, actions in order). Pairs that are not listed cannot happen.
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
    (ACTIVE, LOSE): (ENDING, ("unmap", "stop_idle", "lose_waiting", "settle")),
    (ACTIVE, CLOSE): (ENDING, ("unmap", "stop_idle", "settle")),
    (ENDING, ISSUE): (ENDING, ("take",)),
    (ENDING, FINISH): (ENDING, ("land", "offer", "settle")),
    (ENDING, CANCEL): (ENDING, ("cancel_waiting", "settle")),
    (ENDING, LOSE): (ENDING, ("lose_waiting", "settle")),
    (ENDING, EMPTY): (GONE, ("release",)),
}

# the reason that is reported for a sequence's end, by the event that ended it
REASONS = {
    END: "ended",
    IDLE: "idle",
    CANCEL: "cancelled",
    TIMEOUT: "cancelled",
    DISCONNECT: "cancelled",
    EVICT: "evicted",
    LOSE: "lost",
    CLOSE: "unloaded",
}
