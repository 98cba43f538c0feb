"""Every condition that the code can raise is explained in docs/problems.md, and nothing else is."""

from __future__ import annotations

import re
import traceback

import pytest

from penstock import errors
from penstock.errors import PenstockError
from scripts import conditions
from scripts.site_links import with_code_anchors
from tests.support.pages import DOCS

PAGE = (DOCS / "problems.md").read_text()
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
Raised = dict[str, set[str]]


@pytest.fixture
def raised() -> Raised:
    return conditions.raised_conditions()


def rows(section: str) -> list[list[str]]:
    """The rows of a section's table, without its head."""
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]


TOLD = {
    name: [row[0].partition("`")[2].partition("`")[0] for row in rows(text)]
    for name, text in SECTIONS.items()
}


def test_every_condition_has_a_row(raised: Raised) -> None:
    assert raised.keys() - {code for codes in TOLD.values() for code in codes} == set()


def test_every_row_is_about_a_condition_that_is_raised(raised: Raised) -> None:
    assert {code for codes in TOLD.values() for code in codes} - raised.keys() == set()


def test_sections_and_rows_are_in_order() -> None:
    assert list(SECTIONS) == sorted(SECTIONS)
    for name, codes in TOLD.items():
        assert codes == sorted(codes)
        assert {code.partition(".")[0] for code in codes} == {name}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_row_says_what_it_means_and_what_to_do(name: str) -> None:
    for row in rows(SECTIONS[name]):
        code, meaning, advice = row
        for told in (meaning, advice):
            assert told, code
            assert len(re.findall(r"[.;?] [A-Z`]", told)) < 3, f"{code}: more than three sentences"


def test_rows_with_the_same_code_are_distinguished() -> None:
    for text in SECTIONS.values():
        first = [row[0] for row in rows(text)]
        assert len(first) == len(set(first))


def test_conditions_are_found_in_every_notation(raised: Raised) -> None:
    # That of the class, whole, handed to a function that puts it together, by another function in between.
    assert raised["QUEUE_NOT_FOUND"] == {"QueueNotFoundError"}
    assert raised["STORE_TOO_OLD"] == {"StoreError"}
    assert raised["FEED_UNAVAILABLE.WAL_LEVEL"] == {"FeedUnavailableError"}
    assert raised["CHANGELOG_CONTRACT_VIOLATION.NULL_SEQUENCE"] == {"ChangelogContractViolationError"}
    # Of a class that is not public, of a choice, and of a variable.
    assert raised["ROWS_REJECTED"] == {"SchemaMismatchError"}
    assert raised["INVALID_CDC_OPTION.MISSING_STARTING_VERSION"] == {"InvalidChangeOptionError"}
    assert raised["PYTHON_EXCEPTION"] == {"PenstockError"}


def test_each_condition_belongs_to_a_public_error(raised: Raised) -> None:
    for names in raised.values():
        assert all(issubclass(getattr(errors, name), errors.PenstockError) for name in names)


def test_the_link_in_an_error_leads_to_its_row(raised: Raised) -> None:
    page = with_code_anchors(PAGE)
    anchors = set(re.findall(r'<span id="([^"]+)">', page)) | {name.lower() for name in SECTIONS}
    for code in raised:
        address, _, anchor = str(PenstockError("", condition=code).help_url).partition("#")
        assert address.endswith("/problems/")
        assert anchor in anchors, code


def test_a_traceback_ends_with_the_link() -> None:
    error = errors.QueueNotFoundError("there is no queue 'a'")
    assert traceback.format_exception(error)[-1].endswith("/problems/#queue_not_found\n")
    assert str(error) == "[QUEUE_NOT_FOUND] there is no queue 'a'"
