"""Whom a peer looks for when it starts again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlc.addressbook import AddressBook
from dlc.comm.ids import Voter
from dlc.comm.messages import Record
from dlc.statedir import Ephemeral


class State(Ephemeral):
    """Cannot be written while `full`."""

    full = False

    def save_address_book(self, book: dict[str, Any]) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        super().save_address_book(book)


def record(peer: str, *control: str, left: bool = False) -> Record:
    return cast(Record, SimpleNamespace(voter=Voter(peer, 1), control=control, left=left))


def test_who_left_is_not_looked_for_and_of_others_the_first_address_counts() -> None:
    state = State()
    assert AddressBook(state).known() == {}
    there, gone = record("a", "host:1", "host:2"), record("b", "host:3", left=True)
    AddressBook(state).save([there, gone])
    assert AddressBook(state).known() == {"a": "host:1"}
    AddressBook(state).save([record("c", "[::1]:4")])
    assert AddressBook(state).known() == {"c": "[::1]:4"}, "the new one takes the place of the old one"


@pytest.mark.parametrize(
    "entry", [None, 1, [], {}, {"addresses": []}, {"addresses": 7}, {"addresses": [7]}, {"addresses": ["no address"]}]
)
def test_an_entry_that_is_not_ours_is_left_out(entry: Any) -> None:
    state = State()
    state.save_address_book({"a": entry, "b": {"addresses": ["host:1"]}})
    assert AddressBook(state).known() == {"b": "host:1"}


def test_that_it_cannot_be_written_is_told_once_until_it_can_be_again(caplog: pytest.LogCaptureFixture) -> None:
    state = State()
    book = AddressBook(state)
    told = "the address book could not be written ([Errno 28] No space left on device); the old one stays"
    for _ in range(2):
        state.full = False
        book.save([record("a", "host:1")])
        state.full = True
        book.save([record("b", "host:2")])
        book.save([record("b", "host:2")])
        assert [r.message for r in caplog.records] == [told] and book.known() == {"a": "host:1"}
        caplog.clear()


def test_who_was_lost_is_looked_for_after_all_others_and_not_waited_for() -> None:
    state = State()
    AddressBook(state).save([record("a", "host:1"), record("b", "host:2"), record("c", "host:3")], lost={"a", "c"})
    assert AddressBook(state).awaited() == {"b": "host:2"}
    assert list(AddressBook(state).known().items()) == [("b", "host:2"), ("a", "host:1"), ("c", "host:3")]
    state.save_address_book({"d": {"addresses": ["host:4"], "left": False}})
    assert AddressBook(state).awaited() == {"d": "host:4"}, "one of before this was kept"
