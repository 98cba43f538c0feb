"""The library's log while a command runs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from penstock.cli.output.protocol import Output
from penstock.logs import JsonFormatter

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class CommandLog(logging.Handler):
    """Shows the log on standard error, the way the command shows everything; used as a context.

    Parameters
    ----------
    output
        The command's.
    verbose
        0 for warnings, 1 for what happens too, 2 for each step.
    as_json
        Whether each record is a line of JSON, with its fields.
    """

    def __init__(self, output: Output, verbose: int = 0, *, as_json: bool = False) -> None:
        super().__init__(_LEVELS[min(verbose, len(_LEVELS) - 1)])
        self._output, self._as_json = output, as_json
        self._formatter = JsonFormatter()
        self._logger = logging.getLogger("penstock")
        self._before = logging.NOTSET

    def emit(self, record: logging.LogRecord) -> None:
        if self._as_json:
            self._write(self._formatter.fields(record))
        # That a store is tried again is of interest to people alone.
        elif getattr(record, "action", None) != "store_retry" or sys.stderr.isatty():
            self._output.note(f"{record.levelname.lower()}: {record.getMessage()}")

    def _write(self, fields: Mapping[str, Any]) -> None:
        print(json.dumps(self._output.redacted(fields)), file=sys.stderr)

    def __enter__(self) -> None:
        self._before = self._logger.level
        self._logger.addHandler(self)
        self._logger.setLevel(self.level)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before)
