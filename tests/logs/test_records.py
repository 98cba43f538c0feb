"""Every log record has the same form, and the docs list all of them."""

from __future__ import annotations

import ast
import logging
import re

import pytest

from tests.logs.records import DIRECTIVE, LEVELS, PAGE, Record, loggers, modules, records, shown, table

RECORDS = records()
_SNAKE = re.compile(r"[a-z]+(_[a-z]+)*")
_OWN = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
# Whose logger is not that of their room: what it has to do with are the queries of a session.
_PROGRAMS = ("cli", "ui")
_OTHERS = {"penstock.spark.progress_log": {"log": "penstock.progress"}}


def each_record() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("record", RECORDS, ids=[record.where for record in RECORDS])


def test_every_logger_has_records() -> None:
    named = {name for _, tree in modules() for name in loggers(tree).values()}
    assert named == {record.logger for record in RECORDS}
    assert len(RECORDS) > 50


def test_every_logger_has_the_name_of_its_package() -> None:
    for module, tree in modules():
        for variable, name in loggers(tree).items():
            wanted = _OTHERS.get(module, {}).get(variable, ".".join(module.split(".")[:2]))
            assert name == wanted, module


def test_loggers_are_used_only_through_their_variables() -> None:
    # Nobody logs through the logging module itself, whose root logger is the program's.
    for module, tree in modules():
        calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        direct = {f"logging.{name}" for name in (*LEVELS, "log", "exception", "critical")}
        assert not direct & set(calls), module


def test_the_library_configures_no_logging() -> None:
    found = {
        (module, ast.unparse(node))
        for module, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and re.search(r"\b(addHandler|setLevel|basicConfig)$", ast.unparse(node.func))
        # That is the JVM's, of a session which the library has made.
        and (module, ast.unparse(node.func))
        != ("penstock.spark.internals.sessions", "log4j.core.config.Configurator.setLevel")
        if module.split(".")[1] not in _PROGRAMS
    }
    assert not found


@each_record()
def test_a_record_has_a_level_a_plain_message_and_an_action(record: Record) -> None:
    assert record.levels
    assert set(record.levels) <= set(LEVELS)
    assert record.message is not None, "values are arguments and fields, never put into the text beforehand"
    assert "{" not in record.message
    assert re.search("[a-z]{3}", DIRECTIVE.sub("", record.message)), "it says something by itself"
    if record.arguments is not None:
        assert len(DIRECTIVE.findall(record.message)) == record.arguments
    assert record.action is not None
    assert _SNAKE.fullmatch(record.action)


@each_record()
def test_the_fields_of_a_record_are_documented_and_not_reserved_by_logging(record: Record) -> None:
    assert all(_SNAKE.fullmatch(name) for name in record.fields)
    assert not _OWN & set(record.fields)
    assert set(record.fields) <= documented()


def documented() -> set[str]:
    """The fields that the docs explain."""
    explained = PAGE.read_text().partition("## The fields\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", explained, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"\w+", row)}


def test_the_docs_explain_only_existing_fields() -> None:
    assert documented() - {"action"} == {name for record in RECORDS for name in record.fields}


def test_the_docs_list_all_records() -> None:
    assert shown() == table(), "python -m tests.logs.records writes them"
