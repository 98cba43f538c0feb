"""Work in several threads: in order, none further after an error, and at the end of a program, too."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from penstock.parallel import ahead, in_parallel
from tests.support.waiting import wait_until


def test_results_have_the_order_of_the_items() -> None:
    def slow_first(number: int) -> int:
        time.sleep(0.05 if number == 0 else 0)
        return -number

    assert in_parallel(slow_first, range(100)) == [-number for number in range(100)]
    assert in_parallel(slow_first, []) == []


def test_items_are_done_at_the_same_time() -> None:
    together = threading.Barrier(16)
    assert in_parallel(lambda _: together.wait(30), range(16))


def test_the_error_of_the_first_item_that_failed_is_raised_and_no_other_is_begun() -> None:
    begun = []

    def failing(number: int) -> None:
        begun.append(number)
        if number in (3, 5):
            raise ValueError(number)
        time.sleep(0.01)

    with pytest.raises(ValueError, match="3"):
        in_parallel(failing, range(1000))
    assert len(begun) < 100


def test_an_interrupt_is_not_hidden_by_an_error() -> None:
    together = threading.Barrier(2)

    def ends(number: int) -> None:
        together.wait(30)
        raise ValueError if number == 0 else KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_parallel(ends, range(2))


def test_the_next_item_is_made_ahead() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in range(3):
            made.append(number)
            yield number

    found = ahead(items())
    assert next(found) == 0
    wait_until(lambda: made == [0, 1])
    assert list(found) == [1, 2]


def test_an_error_comes_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError

    found = ahead(items())
    assert next(found) == 1
    with pytest.raises(KeyError):
        next(found)


def test_items_are_not_made_after_the_caller_has_stopped() -> None:
    ended = threading.Event()

    def items() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            ended.set()

    source = items()
    found = ahead(source)
    next(found)
    found.close()  # type: ignore[attr-defined]  # a generator
    source.close()
    assert ended.is_set()


def test_threads_that_outlive_the_main_one_work() -> None:
    program = """
import threading, time
from penstock.parallel import ahead, in_parallel

def later():
    threading.main_thread().join()
    print(in_parallel(lambda each: each, range(5)), list(ahead(iter("ab"))))

threading.Thread(target=later).start()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("[0, 1, 2, 3, 4] ['a', 'b']\n", "")
