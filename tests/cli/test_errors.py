"""How commands fail: one line, an exit code, and never a password."""

from __future__ import annotations

import re
import sys
import time

import pytest
import typer

from penstock.cli import main
from penstock.cli.commands import shared
from penstock.cli.output import one_line
from penstock.errors import InvalidInputError
from penstock.redaction import redact, secrets_of, sentence
from tests.support.commands import Penstock, run_penstock


def test_an_error_is_one_line_with_a_link(penstock_sqlite: Penstock) -> None:
    penstock_sqlite("queue", "create", "orders", "--schema", "id int")
    said = penstock_sqlite("queue", "show", "ordres", code=1)
    assert said.out == ""
    page = "https://penstock-spark.github.io/penstock/problems/#queue_not_found"
    assert said.err == "error: [QUEUE_NOT_FOUND] there is no queue 'ordres'. Did you mean 'orders'?\n"
    assert said.help == page
    output = penstock_sqlite("queue", "show", "ordres", "--json", code=1)
    assert output.out == ""
    assert output.error == {
        "error": "QUEUE_NOT_FOUND",
        "message": "there is no queue 'ordres'. Did you mean 'orders'?",
        "parameters": {"queue": "ordres"},
        "help": page,
    }


@pytest.mark.parametrize("secret", ["postgres", "gres", "sql:"])
def test_a_url_keeps_its_scheme_whatever_the_password(secret: str) -> None:
    output = f"postgresql://app@db/shop: no route; the password was {secret}"
    assert redact(output, [secret]) == "postgresql://app@db/shop: no route; the password was ***"
    assert sentence(output, 300, [secret]).startswith("postgresql://app@db/shop")


def test_json_may_be_requested_before_the_command(penstock_sqlite: Penstock) -> None:
    assert penstock_sqlite("--json", "queue", "list").json == {"queues": []}
    assert penstock_sqlite("--json", "queue", "show", "x", code=1).error["error"] == "QUEUE_NOT_FOUND"


def test_an_unexpected_error_is_also_one_line(
    penstock_sqlite: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("first line\nsecond \x1b line")

    monkeypatch.setattr(shared.Run, "connect", fails)
    said = penstock_sqlite("queue", "list", code=1).err
    assert said == (
        "error: [UNEXPECTED] RuntimeError: first line second \\x1b line; run it again with --debug to see "
        "where\n"
    )
    assert penstock_sqlite("queue", "list", "--json", code=1).error["parameters"] == {"type": "RuntimeError"}
    for words in (["queue", "list", "--debug"], ["--debug", "queue", "list"]):
        said = penstock_sqlite(*words, code=1).err
        assert said.startswith("Traceback")
        assert "--debug" not in said.splitlines()[-1]


def test_an_interrupt_prints_nothing(penstock_sqlite: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shared.Run, "connect", interrupted)
    said = penstock_sqlite("queue", "list", code=130)
    assert (said.out, said.err) == ("", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["quue"], "No such command 'quue'"),
        (["queue", "lst"], "No such command 'lst'"),
        (["queue", "creat"], "Did you mean 'create'? See penstock queue --help"),
        (["queue", "show"], "Missing argument 'QUEUE'"),
        (["queue", "show", "a", "b"], "Got unexpected extra argument"),
        (["queue", "list", "--nope"], "No such option: --nope"),
        (["queue", "peek", "q", "-n", "many"], "Invalid value for '--rows' / '-n'"),
        (["queue", "put", "q", "--format", "xml"], "Invalid value for '--format'"),
        (["queue", "put", "q", "--batch-rows", "0"], "Invalid value for '--batch-rows'"),
        (["consumer", "seek", "c", "q"], "Missing option '--to'"),
    ],
)
def test_wrong_usage_is_one_line_with_exit_code_2(words: list[str], said: str) -> None:
    found = run_penstock(*words, code=2)
    assert found.out == ""
    assert found.err.count("\n") == 1
    assert re.match(r"error: \[USAGE\] .*See penstock.* --help\n", found.err)
    assert said in found.err
    output = run_penstock(*words, "--json", code=2).error
    assert output["error"] == "USAGE"
    assert said.partition(" See ")[0] in output["message"]


@pytest.mark.parametrize("words", [[], ["queue"], ["store"], ["consumer"]])
def test_a_command_group_without_a_command_shows_its_help(words: list[str]) -> None:
    found = run_penstock(*words, code=2)
    assert "Commands:" in found.err
    assert found.out == ""


@pytest.mark.parametrize(
    ("url", "condition"),
    [
        ("postgresql://app:hunter22@127.0.0.1:port/shop", "INVALID_URL"),
        ("postgresql://app@127.0.0.1:port/shop?password=hunter22", "INVALID_URL"),
        ("postgresql://app:p%40ss%2Fword@127.0.0.1:port/shop", "INVALID_URL"),
        ("mysql://app:hunter22@127.0.0.1/shop", "INVALID_URL.UNKNOWN_KIND"),
        ("sqlite://app:hunter22@shop", "INVALID_URL.MISSING_PART"),
        ("nonsense:hunter22@127.0.0.1", "INVALID_URL"),
        ("host=db user=app password='my hunter22' dbname=x", "INVALID_URL"),
        ("host=db password = hunter22", "INVALID_URL"),
    ],
)
def test_no_password_is_shown(url: str, condition: str) -> None:
    found = [
        run_penstock("queue", "list", "--url", url, *extra, code=1) for extra in ([], ["--json"], ["--debug"])
    ]
    if "nonsense" not in url:
        # Put where no URL belongs.
        found += [run_penstock("queue", "list", url, *extra, code=2) for extra in ([], ["--json"])]
    assert found[1].error["error"] == condition
    for result in found:
        assert result.err
        for secret in ("hunter22", "p%40ss", "p@ss"):
            assert secret not in result.out + result.err


def test_an_error_about_a_server_does_not_reveal_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_URL", "postgresql://app:hunter22@127.0.0.1:1/shop")

    def fails(run: shared.Run, **_: object) -> None:
        raise RuntimeError(f"no answer from {run.url}, password 'hunter22'")

    monkeypatch.setattr(shared.Run, "connect", fails)
    for extra in ([], ["--json"], ["--debug"]):
        found = run_penstock("queue", "list", *extra, code=1)
        assert "no answer" in found.err
        assert "hunter22" not in found.err


def test_an_unavailable_server_is_one_line_however_often_it_is_retried() -> None:
    """On a terminal each retry is shown."""
    for extra in ([], ["--json"]):
        found = run_penstock("queue", "list", "--url", "postgresql://app@127.0.0.1:1/shop", *extra, code=1)
        assert len(found.err.splitlines()) == 1, found.err


def test_passwords_are_removed_from_any_text() -> None:
    secrets = secrets_of("postgresql://app:p%40ss%2Fword@host/shop?sslpassword=tls-secret")
    text = redact("p@ss/word and p%40ss%2Fword and tls-secret and postgres://u:x@h/d?password=y&a=b", secrets)
    assert text == "*** and *** and *** and postgres://u:***@h/d?password=***&a=b"
    for keywords in ("password='my secret' x", "sslpassword = secret", "PASSWORD='it\\'s secret'"):
        assert "secret" not in redact(f"host=db {keywords}\nand what follows")
        assert redact(f"host=db {keywords}\nand what follows").endswith("\nand what follows")
    assert secrets_of("sqlite:///a.db") == []
    assert secrets_of("postgresql://app@host/shop") == []


def test_a_long_text_is_searched_fast() -> None:
    began = time.perf_counter()
    long = "a." * 10_000
    assert sentence(long, len(long)) == long
    assert sentence(f"{long}token=x {long}", 3 * len(long)) == f"{long}token=*** {long}"
    assert time.perf_counter() - began < 5


_LONG = "x" * 5000


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([_LONG], 2),
        (["queue", "show", "q", f"--{_LONG}"], 2),
        (["queue", "show", _LONG], 1),
        (["queue", "peek", "q", "--columns", _LONG], 1),
        (["queue", "put", "q", _LONG], 1),
        (["queue", "list", "--url", f"sqlite:///x?{_LONG}=1"], 1),
        (["changes", "show", f"queue:q?{_LONG}=1"], 1),
        (["changes", "show", "queue:q", "--mode", _LONG], 1),
        (["queue", "put", "q", "--format", "csv"], 1),
        (["queue", "put", "q", "--format", "jsonl"], 1),
    ],
)
def test_a_long_name_does_not_make_a_long_error(
    penstock_sqlite: Penstock, words: list[str], code: int
) -> None:
    penstock_sqlite("queue", "create", "q", "--schema", "id int")
    rows = f'{{"{_LONG}": 1}}\n' if "jsonl" in words else "\0" * 5000
    said = penstock_sqlite(*words, stdin=rows, code=code).err
    assert all(len(line) < 400 for line in said.splitlines())


def test_control_characters_are_escaped() -> None:
    assert one_line("a\nb\x1b[2Jc\u202ed \t e") == "a b\\x1b[2Jc\\u202ed e"


def test_every_command_has_help_with_its_options() -> None:
    groups = {"store": 3, "queue": 11, "consumer": 7}
    for group, least in groups.items():
        listed = re.findall(
            r"^  ([\w-]+)  ", run_penstock(group, "--help").out.partition("Commands:")[2], re.MULTILINE
        )
        assert len(listed) >= least
        for name in listed:
            shown = run_penstock(group, name, "--help").out
            for option in (
                "--url",
                "--json",
                "--debug",
                "--verbose",
                "--log-json",
                "Examples:",
                f"penstock {group} {name}",
            ):
                assert option in shown, (group, name, option)


def test_a_missing_package_is_reported_with_what_to_install(
    penstock_sqlite: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'psycopg'", name="psycopg")

    monkeypatch.setattr(shared.Run, "connect", missing)
    said = penstock_sqlite("queue", "list", code=1).err
    assert (
        said
        == "error: [MISSING_DEPENDENCY] this command needs psycopg: pip install 'penstock-spark[postgres]'\n"
    )


@pytest.mark.parametrize(("word", "extra"), [("queue", "cli"), ("ui", "ui")])
def test_without_typer_the_extra_of_the_command_is_named(
    word: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "penstock.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    said = run_penstock(word, code=1).err
    hint = f"pip install 'penstock-spark[{extra}]'"
    assert said == f"error: [MISSING_DEPENDENCY] the command line needs typer: {hint}\n"


def test_the_command_line_without_its_extra_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "penstock.cli.app")
    monkeypatch.setitem(sys.modules, "typer", None)
    assert main(["--version"]) == 1
    assert "pip install 'penstock-spark[cli]'" in capsys.readouterr().err


def test_a_typer_error_raised_in_a_command_is_wrong_usage(
    penstock_sqlite: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise typer.BadParameter("not that one")

    monkeypatch.setattr(shared.Run, "connect", refuses)
    assert "not that one" in penstock_sqlite("queue", "list", code=2).err


def test_without_a_prompt_confirmation_requires_the_yes_option() -> None:
    run = shared.Run(shared.Common(json=True))
    run.confirm("Really?", yes=True)
    with pytest.raises(InvalidInputError, match="Repeat it with --yes"):
        run.confirm("Really?", yes=False)
