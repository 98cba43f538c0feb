"""What a process has read last."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.objects.recent import RecentParts


class Loads:
    """Loads keys that are their own bytes, and counts them."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []

    def of(self, recent: RecentParts, keys: Sequence[bytes]) -> list[bytes]:
        def load(places: Sequence[int]) -> list[memoryview]:
            self.loaded += [keys[place] for place in places]
            return [memoryview(keys[place]) for place in places]

        return [bytes(each) for each in recent.read(keys, load)]


@given(st.lists(st.lists(st.binary(min_size=1, max_size=6), max_size=6), max_size=30))
def test_a_read_returns_its_parts_and_little_is_kept(reads: list[list[bytes]]) -> None:
    recent, loads = RecentParts(max_bytes=20), Loads()
    for keys in reads:
        assert loads.of(recent, keys) == keys
        kept = [part.data for part in recent._parts.values()]
        assert None not in kept
        assert sum(map(len, filter(None, kept))) == recent._bytes <= 20
        assert all(len(each) <= 5 for each in kept if each is not None)


def test_what_was_read_last_is_not_read_again() -> None:
    recent, loads = RecentParts(max_bytes=12), Loads()
    for keys in ([b"aaa", b"bbb"], [b"aaa", b"ccc"], [b"aaa"], [b"ddd", b"eee"], [b"aaa"], [b"bbb"]):
        loads.of(recent, keys)
    assert loads.loaded == [b"aaa", b"bbb", b"ccc", b"ddd", b"eee", b"bbb"]


@pytest.mark.parametrize("fails", [False, True])
def test_two_readers_of_the_same_part_read_it_once_unless_that_fails(fails: bool) -> None:
    recent, began, go = RecentParts(), threading.Event(), threading.Event()
    found: list[list[bytes]] = []

    def slowly(places: Sequence[int]) -> list[bytes]:
        began.set()
        assert go.wait(10)
        if fails:
            raise OSError("away")
        return [b"part"]

    def first() -> None:
        try:
            found.append([bytes(each) for each in recent.read(["key"], slowly)])
        except OSError:
            found.append([])

    again: list[int] = []

    def second() -> None:
        def load(places: Sequence[int]) -> list[bytes]:
            again.extend(places)
            return [b"part"]

        found.append([bytes(each) for each in recent.read(["key"], load)])

    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert began.wait(10)
    threads.append(threading.Thread(target=second))
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert sorted(found) == ([[], [b"part"]] if fails else [[b"part"], [b"part"]])
    assert again == ([0] if fails else [])
