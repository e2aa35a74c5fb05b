"""Debug levels, what DETAIL adds, and breakpoints."""

from phalanx import _native


def test_notes_are_kept_by_rank():
    roster = _native.Roster.create(3, threads=True)
    roster.note(1, "first")
    roster.note(1, "zwölf")
    roster.note(2, "")
    assert roster.notes() == ["", "zwölf", ""]


def test_of_a_long_note_the_end_is_kept_in_whole_characters():
    roster = _native.Roster.create(1, threads=True)
    roster.note(0, "ö" * 5000 + "end")
    (kept,) = roster.notes()
    assert kept == "ö" * ((8192 - 3) // 2) + "end"
