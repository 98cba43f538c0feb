"""Options as Spark gives them: text by name, whatever the name's case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidOption
from penstock.instants import micros_of

SPARKS_OWN = frozenset({"path", "checkpointlocation", "queryname"})
CONF_PREFIX = "spark.penstock."


class Given:
    """Options by name, whatever their case."""

    def __init__(
        self, given: Mapping[str, str], known: Iterable[str], what: str, others: Iterable[str] = ()
    ) -> None:
        self._given = {name.lower(): str(value) for name, value in given.items()}
        by_lower = {name.lower(): name for name in known}
        for name in self._given.keys() - by_lower.keys() - SPARKS_OWN:
            elsewhere = next((other for other in others if other.lower() == name), None)
            if elsewhere is not None:
                raise InvalidOption(
                    f"option {in_quotes(elsewhere)} does not apply to a {what}: leave it out",
                    option=elsewhere,
                )
            raise InvalidOption(
                f"unknown option {in_quotes(name)} of a {what}.{did_you_mean(name, by_lower.values())} "
                f"Known ones: {', '.join(sorted(by_lower.values()))}",
                option=name,
            )

    def own(self, name: str) -> str | None:
        return self._given.get(name)

    def text(self, name: str) -> str | None:
        value = self._given.get(name.lower())
        if value == "":
            raise InvalidOption(
                f"option {name}='' is empty: give a value, or leave it out", option=name, value=value
            )
        return value

    def required(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise InvalidOption(
                f"option {in_quotes(name)} is missing: give it, or set {CONF_PREFIX}{name} on the session before "
                "penstock.register(spark)",
                option=name,
            )
        return value

    def value(self, name: str, parse: Callable[[str], Any], default: Any = None) -> Any:
        text = self.text(name)
        if text is None:
            return default
        try:
            return parse(text)
        except ValueError as error:
            raise InvalidOption(
                f"option {name}={in_quotes(text)}: {error}", option=name, value=text
            ) from None


def boolean(text: str) -> bool:
    values = {"true": True, "false": False}
    if text.lower() not in values:
        raise ValueError("give true or false")
    return values[text.lower()]


def positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError("give a whole number from 1")
    return number


def timestamp(text: str) -> int:
    if text.isdigit():
        return int(text) * 1000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("give a time such as 2026-01-31T12:00:00Z, or milliseconds since 1970") from None
    if moment.tzinfo is None:
        raise ValueError("give the time zone too, such as 2026-01-31T12:00:00Z")
    return micros_of(moment)
