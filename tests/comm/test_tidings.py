"""What a helper says of its spans, in one line for all."""

from dlc.comm.tidings import WAIT_S, Tidings, spans_text


def test_runs_of_spans_are_told_by_their_ends() -> None:
    assert spans_text([3]) == "span 3"
    assert spans_text([4, 3]) == "spans 3, 4"
    assert spans_text([9, 0, 3, 4, 5, 7, 8]) == "spans 0, 3 to 5, 7 to 9"


def test_what_is_the_same_waits_for_others_and_is_told_once() -> None:
    tidings = Tidings()
    tidings.add("mine now", 3, 7, 10.0)
    tidings.add("mine now", 1, 9, 10.0 + WAIT_S / 2)
    tidings.add("lost", 2, 1, 10.0 + WAIT_S / 2, serious=True)
    assert not tidings.due(10.0 + 0.9 * WAIT_S)
    first, second = tidings.due(10.0 + WAIT_S)
    assert (first.text, first.serious) == ("spans 1, 3: mine now (versions 7 to 9)", False)
    assert (second.text, second.serious) == ("span 2: lost (version 1)", True)
    assert not tidings.due(99.0)
    tidings.add("mine now", 3, 8, 100.0)
    assert not tidings.due(100.0), "it waits anew"
    assert [notice.text for notice in tidings.due(100.0 + WAIT_S)] == ["span 3: mine now (version 8)"]
