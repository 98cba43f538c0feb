"""What a query emits in a mode: which rows, when, for how long state is kept, and what the sink has to do."""

from __future__ import annotations

from dataclasses import dataclass

NEW_ROWS, FINISHED, CHANGED, ALL = "new rows", "finished groups", "changed groups", "all groups"
MATCHED, ONLY_MATCHED, FUNCTION = "matched rows", "matched rows alone", "the function's rows"
AT_ONCE, AFTER_WATERMARK = "at once", "after the watermark"
NO_STATE, COUNT, UNTIL_WATERMARK, ONE_SIDE, FOR_EVER, OWN = (
    "none",
    "a count",
    "until the watermark",
    "for ever on one side",
    "for ever",
    "its own",
)
ADD, REPLACE_BY_KEY, REPLACE_ALL = "add", "replace by key", "replace all"

_ROWS = {
    NEW_ROWS: "each row comes out once",
    FINISHED: "each group comes out once, with its last values,",
    CHANGED: "the groups that a micro-batch changed come out, with their new values",
    ALL: "all groups come out again in each micro-batch that has new rows",
    MATCHED: "rows with a match come out once, in the micro-batch that reads the later of the two, and rows without one",
    ONLY_MATCHED: "rows with a match come out once, in the micro-batch that reads the later of the two, and rows without one never do "
    "where they are kept for ever",
    FUNCTION: "the rows that the stateful function returns come out",
}
_WHEN = {
    AT_ONCE: "in the micro-batch that reads it",
    AFTER_WATERMARK: "in the first micro-batch after the watermark has passed it",
}
_STATE = {
    NO_STATE: "no state is kept",
    COUNT: "only the number of rows so far is kept",
    UNTIL_WATERMARK: "state is kept until the watermark has passed it, and rows that come after that are dropped",
    ONE_SIDE: "state of one side of the join is kept for ever, that of the other until the watermark has passed it",
    FOR_EVER: "state is kept for ever",
    OWN: "state is kept until the function or its timer removes it",
}
_SINK = {
    ADD: "the sink only adds rows",
    REPLACE_BY_KEY: "the sink has to replace what it has by key",
    REPLACE_ALL: "the sink has to replace all that it has",
}


@dataclass(frozen=True)
class Emits:
    """Claims that a preview can be held against; ``str`` is the sentence."""

    rows: str
    when: str
    state: str
    sink: str
    key: tuple[str, ...] = ()
    """By which columns the sink replaces."""

    def __str__(self) -> str:
        when = f" {_WHEN[self.when]}" if self.rows in (NEW_ROWS, FINISHED, MATCHED) else ""
        key = f" ({', '.join(self.key)})" if self.key and self.sink == REPLACE_BY_KEY else ""
        sentence = f"{_ROWS[self.rows]}{when}; {_STATE[self.state]}; {_SINK[self.sink]}{key}."
        return sentence[0].upper() + sentence[1:]
