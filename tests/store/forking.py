"""Run a function in a fork of this process."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def in_a_fork(work: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
