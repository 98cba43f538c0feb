"""Removing passwords from any text takes time that is linear, not quadratic, in its length."""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from penstock import redaction
from penstock.errors import InvalidUrlError, QueueNotFoundError
from penstock.lake.storage import without_secrets
from penstock.modes.previewing.run import refusal
from penstock.pipeline.progress_format import descriptions_of, error_of
from penstock.redaction import redact, sentence, without_literals, without_user_info
from penstock.spark.checkpoint import redact_location, redacted_cause
from penstock.spark.error_boundary import original_error
from penstock.store.url import parse_url

PIECES = (
    "a", "x", "a://", "//", ":", "@", "/", "?", "&", "=", " ", "\n", "\t", ".", "-", "$", "'", '"', ",", ")",
    "password", "sslpassword", "password=", "?password=", "password =", "token", "secret", "secret:",
    "access_key=", "pwd", "penstock.", " at ", "://", "é", "1f",
    "http://", "--", "('", "E", "Cookie: ", "-key", "%", "%3D", "-----BEGIN PRIVATE KEY-----",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
SECRET = "QZ7hush9"


def by_the_old_pattern(text: str) -> str:
    """An earlier pattern that removes the same, but takes minutes for some texts."""
    return re.sub(r"(//[^\s/:@]*):[^\s]*@", r"\1:***@", text)


@settings(max_examples=1000, deadline=None)
@given(TEXTS)
@example("a://u:p@x://v:q@h b://u:@h")
@example("://u:p@h a://:@ a://b/c:d@e")
def test_passwords_in_urls_are_removed_as_the_earlier_pattern_did(text: str) -> None:
    text = text.replace("http://", "ftp://")  # of which the user is a token
    assert without_user_info(text) == by_the_old_pattern(text)


@settings(max_examples=500, deadline=None)
@example("http://a@", "a://me:{}@host", "")
@given(
    before=TEXTS,
    form=st.sampled_from(
        [
            "a://me:{}@host",
            "a://:{}@b@host",
            "a://host/?password={}&x=y",
            "host=db password='my {}' x",
            "sslpassword = {}",
            "token={}",
            "secret_key: '{}",
            'access-key="some {} more"',
            "pwd='a {}\nb' and",
            "password: {}",
            "password: my {}",
            "db_password = {}",
            "user.Password={}",
            '"password": "{}"',
            '{{"password":"a \\" {}", "host": "h"}}',
            "{{'passphrase': 'it\\'s {}'}}",
            "alter role app password '{}'",
            "ALTER ROLE app PASSWORD  'a b {}'",
            "Authorization: Bearer {}",
            '"authorization": "Basic {}"',
            "api_key: {}",
            "?x=1&db_password={}&y",
            "https://b.example/o?X-Amz-Credential=me&X-Amz-Signature={}&x=1",
            "https://b.example/o?sv=1&sig={}&se=2",
            "SharedAccessSignature sig={}",
            "https://b.example/o?access_token={}",
            "connect //me:{}@host/db",
            "//:{}@host",
            "sent Bearer {}",
            "environment: PGPASSWORD {}",
            "PGPASSWORD={}",
            "https://{}@github.com/x",
            "git+HTTP://{}:@host/x",
            "https://{}:x-oauth-basic@github.com",
            "create role x with password E'it\\'s {}'",
            "create role x password U&'{} x' login",
            "token=b'a {}'",
            "('password', '{}')",
            '["x.secret", "a {}"]',
            "[(b'Cookie', b'a={}')]",
            "['psql', '--password', '{}', 'x']",
            "run --password {}",
            "run --password '{} x'",
            "run --password=a {}",
            "run --api-token\t{} x",
            "run -secret={}",
            'Authorization: Digest username="a", response="{}"',
            "Proxy-Authorization: Negotiate {}",
            "Cookie: a=b; session={}",
            "set-cookie: session={}; HttpOnly",
            '{{"Cookie": "session={}"}}',
            "-----BEGIN PRIVATE KEY-----\nMII\n{}\n-----END PRIVATE KEY-----\n",
            "password: -----BEGIN RSA PRIVATE KEY-----\nMII\n{}",
            "Ocp-Apim-Subscription-Key: {}",
            "'x-functions-key': '{}'",
            "X-Auth-Token: {}",
            "https://host/?a=1&subscription-key={}&b",
            "https://host/?next=a%3Fpassword%3D{}%26b",
            "password%253D{}",
            "sv%3D1%26sig%3D{}",
            "alter role app password $$a {}$$",
            "alter role app password $x$a\n{}$x$ login",
            "create user app identified by '{} x'",
            "(spark.hadoop.fs.s3a.secret.key,{})",
            "Map(fs.s3a.secret.key -> {}, a -> 1)",
            "password -> {}",
            "spark.ssl.keyPassword\t{}",
            "spark.ssl.keyStorePassword  {}",
            "AZURE_STORAGE_KEY={}",
            "azure_storage_master_key: {}",
            "aws_sse_customer_key_base64={}",
            '{{"name": "DB_PASSWORD", "value": "{}"}}',
            "<property><name>fs.s3a.secret.key</name>\n<value>{}</value></property>",
            "CREATE USER app IDENTIFIED BY {};",
            "db_password:\n  a {}",
            "password: |\n    {}\n",
            "<db:password type='x'>a {}</db:password>",
            "<ClientSecret>{}",
            "<password>\n  {}\n</password>",
            "DB_PASS={} x",
            "?user=a&pass={}&b",
            "sent ghp_{}",
            "xoxb-{}-1",
            "glpat-1{}",
            "sk_live_{}",
            "a eyJhbGci.eyJzdWIi{}.x",
            "DB_PASS: {}",
            "{{'db_pass': '{}'}}",
            "'DB_PASS': 'a {}'",
            "('SHOP_DB_PASS', '{}')",
            "passcode={}",
            "get(x, auth=('u', 'a {}'))",
            '{{"auth": ["u", "{}"]}}',
            "nats://{}@h:4222",
            "https://hooks.slack.com/services/T0/B0/{}",
            "next=https%3A%2F%2Fhooks.slack.com%2Fservices%2FT0%2F{}",
            "hf_abcdefghijklmnopqrst{}",
            "npm_abcdefghijklmnopqrst{}",
            "AIzaSyabcdefghijklmnopqr-{}",
            "dop_v1_{}",
            "curl -u u:{} https://h",
            "curl -sSu 'u:a {}' https://h",
            "/usr/bin/curl -X GET \\\n  --user u:{} x",
            '["curl", "-u", "u:{}"]',
            "mysql -h h -p{} shop",
            "mysqldump -p'a {}' shop",
            "sqlplus -s scott/{}@host:1521/x",
            "jdbc:oracle:thin:scott/{}@//h:1521/x",
            "localhost:5432:shop:app:a {}",
            "the line '*:*:*:app:{}' of pgpass",
        ]
    ),
    behind=TEXTS,
)
def test_no_secret_is_shown_wherever_a_text_is_truncated(before: str, form: str, behind: str) -> None:
    # The value of an open keyword, or an open quote, would end where this one begins.
    assume(not re.search(r"""["']|[=:]\s*$""", before))
    text = f"{before}\n{form.format(SECRET)}{behind}"
    assert SECRET not in sentence(text, len(text))
    assert SECRET not in redact(text)
    with pytest.MonkeyPatch.context() as patch:
        for cut in range(1, len(text), max(1, len(text) // 20)):
            patch.setattr(redaction, "SEARCHED_CHARACTERS", cut)
            assert SECRET[:4] not in sentence(text, len(text))


def test_a_known_secret_is_removed_before_a_text_is_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    for cap in range(1, 30):
        monkeypatch.setattr(redaction, "SEARCHED_CHARACTERS", cap)
        assert "hush" not in redact(f"the word is {SECRET}, and it is long", [SECRET])


def test_an_error_is_shown_without_the_passwords_of_urls_that_were_passed_as_something_else() -> None:
    error = QueueNotFoundError(
        "there is no queue 'postgresql://app:s3@cret@db/shop?sslpassword=s3cret&schema=x'",
        queue="postgresql://app:s3cret@db/shop",
        known=["//app:s3cret@db"],
    )
    assert str(error).endswith("'postgresql://app:***@db/shop?sslpassword=***&schema=x'")
    assert error.parameters == {"queue": "postgresql://app:***@db/shop", "known": ["//app:***@db"]}
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("name", ["password", "client_secret", "Authorization", "apiKey"])
@pytest.mark.parametrize("escapes", ["", "\\", "\\\\\\"])
def test_a_secret_in_json_inside_json_is_removed(name: str, escapes: str) -> None:
    text = f'{{"error":"{{{escapes}"{name}{escapes}": {escapes}"Basic hunter22{escapes}"}}"}}'
    assert "hunter22" not in redact(text)


def test_text_beyond_the_search_limit_is_not_shown() -> None:
    text = f"{'word ' * redaction.SEARCHED_CHARACTERS}password=x"
    shown = redact(text)
    assert len(shown) == redaction.SEARCHED_CHARACTERS + 1
    assert shown.endswith("…")
    assert redact("a" * redaction.SEARCHED_CHARACTERS) == "a" * redaction.SEARCHED_CHARACTERS


def test_an_unclosed_quoted_secret_is_removed_to_the_end() -> None:
    assert sentence("token='one two three", 100) == "token=***"
    assert sentence('it has {"secret": "one two"} and more', 100) == 'it has {"secret": ***} and more'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"user": "me", "password": "x y", "host": "h"}', '{"user": "me", "password": ***, "host": "h"}'),
        ("{'password': 'it\\'s', 'n': 1}", "{'password': ***, 'n': 1}"),
        ("alter role a password 'x' login", "alter role a password *** login"),
        ("user: me\npassword: a b\nhost: h", "user: me\npassword:***\nhost: h"),
        ("host=h password='a b' user=u", "host=h password=***"),
        ("check user and password", "check user and password"),
        ("the role has no password, or another one", "the role has no password, or another one"),
        ("set PGPASSWORD or PGPASSFILE", "set PGPASSWORD or PGPASSFILE"),
        ("https://h/?design=a&sigma=2&a_sig=x&b=1", "https://h/?design=a&sigma=2&a_sig=***&b=1"),
        ("Authorization: Bearer abcdefgh, and more\nHost: h", "Authorization: ***\nHost: h"),
        ('{"Authorization": "Basic x", "n": 1}', '{"Authorization": ***, "n": 1}'),
        ("Cookie: a=b; c=d\r\nHost: h", "Cookie: ***\nHost: h"),
        ("X-Key-Id: a\nx-functions-key: b\nHost: h", "X-Key-Id: a\nx-functions-key: ***\nHost: h"),
        ("get https://x@h/a?b=c now", "get https://***@h/a?b=c now"),
        ("create role a password E'x' login", "create role a password *** login"),
        ("[('user', 'me'), ('password', 'x'), ('n', 1)]", "[('user', 'me'), ('password', ***), ('n', 1)]"),
        ("['psql', '--password', 'x', '-l']", "['psql', '--password', ***, '-l']"),
        ("psql --password x --host h", "psql --password *** --host h"),
        (
            "a\n-----BEGIN EC PRIVATE KEY-----\nx\n-----END EC PRIVATE KEY-----\nb",
            "a\n-----BEGIN EC PRIVATE KEY-----***-----END EC PRIVATE KEY-----\nb",
        ),
        ("next=%2Fa%3Ftoken%3Dx%26b%3D1", "next=%2Fa%3Ftoken%3D***%26b%3D1"),
        ("the bearer of a token", "the bearer of a token"),
        ("https://h//a:b", "https://h//a:b"),
        ("alter role a password $$x$$ login", "alter role a password *** login"),
        ("create user a identified by 'x' account lock", "create user a identified by *** account lock"),
        ("db:\n  password:\n    x y\n  host: h", "db:\n  password:\n    ***\n  host: h"),
        ("<user>a</user><password>x</password>", "<user>a</user><password>***</password>"),
        ("DB_PASS=x DB_HOST=h", "DB_PASS=*** DB_HOST=h"),
        ("the token ghp_abc, and more", "the token ghp_***, and more"),
        ("DB_PASS: x\nDB_HOST: h", "DB_PASS: ***\nDB_HOST: h"),
        ("{'db_pass': 'x', 'n': 1}", "{'db_pass': ***, 'n': 1}"),
        ("get(u, auth=('me', 'x'), n=1)", "get(u, auth=('me', ***), n=1)"),
        ("see nats://x@h:4222 now", "see nats://***@h:4222 now"),
        (
            "https://hooks.slack.com/services/T0/B0/x, and more",
            "https://hooks.slack.com/services/***, and more",
        ),
        ("curl -s -u me:x https://h/a:b\n-u a:b", "curl -s -u me:*** https://h/a:b\n-u a:b"),
        ("mysql -u me -px shop", "mysql -u me -p*** shop"),
        ("sqlplus scott/x@h:1521/a @run/b.sql", "sqlplus scott/***@h:1521/a @run/b.sql"),
        ("jdbc:oracle:thin:scott/x@//h:1521/a", "jdbc:oracle:thin:scott/***@//h:1521/a"),
        ("h:5432:shop:me:x y\nh:5432", "h:5432:shop:me:***\nh:5432"),
    ],
)
def test_the_text_around_a_password_is_kept(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "the password is wrong",
        "A token of at least 16 characters",
        "--token is needed, or --password",
        "usage: run [--token TOKEN] [--password <password>]",
        "Pass --token or --password, and start again. See --token",
        "give --token --password --host h",
        "--password-file /run/secrets/a --token-env SHOP_TOKEN --no-password shop",
        "write to a@b.c, or see https://h.example/x?mail=a@b.c",
        "see https://h.example:8080/a and https://h.example/@b, or a@b.c",
        '["https://h.example","a@b.c"]',
        "postgresql://me@host/shop and amqp://me@host and abfss://container@account/x",
        "sslkey=/home/me/client.key sslmode=verify-full",
        "cannot open /home/me/password/token.txt, or ~/.ssh/secret-key",
        "columns ('user', 'password', 'host'): the password and the token, 'x'",
        "primary-key: id, partition-key: day, key: a, monkey: b, my_key: c",
        "the cookie was refused; authorization failed",
        "-----BEGIN CERTIFICATE-----\nMII\n-----END CERTIFICATE-----",
        "a 100%3D sign, and a name%3Dvalue",
        "postgresql://me@h/d?password_file=/run/a others can read it; password_env=SHOP is not set",
        "the second pass: 3 rows; bypass=1, compass=2, passes=3",
        "rows are identified by their key, eyJhbGci",
        "spark.ssl.keyPassword is not set",
        "the pair (password, token), (a.b,c) and x -> y",
        "spark.penstock.password_file /run/secrets/shop",
        '{"name": "color", "value": "red"}',
        "forward_pass: 3 ms, {'second_pass': 'x'}, TEST_PASS: 3, trespass: no; the passcode is wrong",
        "auth=basic, auth=(a, b), author=('u', 'x'), OAuth: ('a')",
        "https://hooks.slack.com/docs, npm_config_cache=/a, npm_lifecycle_event, hf_hub_download(), AIzawl",
        "docker run -u 1000:1000 -p8080:80 x; git push -u origin main:main; sort -u a:b; mkdir -pv a",
        "curl -s https://h:80/a -o a:b; curl: (6) could not resolve; a curl of x",
        "mysql -u root -p shop, mysql -p; mysql -P 3306 --protocol=tcp; docker run mysql -p3306:3306",
        "actions/checkout@v4, owner/repo@main, @types/node@18, and/or a@b; use sqlplus and/or rman",
        "jdbc:oracle:thin:@//h:1521/x jdbc:oracle:thin:@h:1521:x",
        "fe80:1234:abcd:ef01:2:3\na.py:12:5:error:x\nhost:port:db:user:password\nh:5432:shop",
        "12:30:15:a:b 2026-01-01T12:30:15 a.c:1234:5: error: x urn:a:b:c:d",
        "<p>the password</p> <passwords/> run --password <password> --host <host>",
    ],
)
def test_texts_without_a_secret_are_shown_unchanged(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("select 'a', 'it''s', b from t", "select '…', '…', b from t"),
        (r"select E'it\'s ' || x, e'\\', 'c'", "select '…' || x, '…', '…'"),
        (r"select name'\', x, 'c'", "select name'…', x, '…'"),
        ("select $$a'b$$, $tag$c $$ d$tag$, $1, x$y$z", "select '…', '…', $1, x$y$z"),
        ("insert into t values ('not closed", "insert into t values ('…'"),
        ("insert into t values (E'not closed\\", "insert into t values ('…'"),
        ("insert into t values ($a$not closed$a", "insert into t values ('…'"),
    ],
)
def test_the_values_of_a_statement_are_not_shown(query: str, shown: str) -> None:
    assert without_literals(query) == shown


def location(text: str) -> None:
    redact_location(text)
    redacted_cause(OSError("x"), text)


def url(text: str) -> None:
    for scheme in ("postgresql:", "postgresql://", "x://", ""):
        with suppress(InvalidUrlError):
            parse_url(f"{scheme}{text}")


LOOKS: dict[str, Callable[[str], object]] = {
    "redact": redact,
    "sentence": lambda text: sentence(text, len(text)),
    "a statement": without_literals,
    "location": location,
    "url": url,
    "a library's error": lambda text: without_secrets(OSError(text), {}),
    "a query's error": lambda text: error_of(RuntimeError(text)),
    "Spark's account": lambda text: original_error(RuntimeError(text)),
    "a refusal of Spark's": lambda text: refusal(RuntimeError(text)),
    "Spark's names": lambda text: descriptions_of({"sink": {"description": text}}, ()),
}
REPEATED = (
    "a://:", "a://", "//:", "//", ":", "@", "a://:@", "a@", "?password=", "password", "password ",
    "password\n", "password= ", "password:", 'password"', "password'\\\\", '"password": "', "passphrase '",
    " ", "\n", "\n ", "\t", "token", "token ", "token.", "token= ", "token='", 'token="', "secret:\n", "'",
    "a.", "a", "a$", "$.", "pwd:", "; ", "SQLSTATE: ",
    "\n at a.", "\n at ", "Caused by: ", "penstock.", "\npenstock.", "é", "accesskey-", "://", "a:",
    "$a$", "$a", "$$", "e'", "e'\\", "e'\\'", "''", "?sig", "?sig=", "&a-", "sig", "Bearer ", "bearer",
    "PGPASSWORD ", "PGPASSWORD", "http://", "https://a", "http://:", "password E'", "token=U&'",
    "password U&",
    "('token', ", "('token', '", "('token', \"", "[\"token\", '", "('token', '\\", "( ", "'--token', '",
    "'--",
    "--token ", "--token --", "--", "-token", "--token \"", "Cookie: ", "Cookie:\n", "cookie", "'cookie': '",
    "'cookie': \"'", "authorization: ", "-----BEGIN PRIVATE KEY-----", "-----BEGIN ", "-----BEGIN A",
    "-----END ",
    "-----BEGIN PRIVATE KEY----------END ", "-key", "-key: ", "a-key:\n", "%", "%25", "token%25", "token%3D",
    "token%3D%", "%26sig",
    "<password>", "<password", "<password ", "<token", "pass=", "password:\n ", "password: |\n ",
    "password $a$", "<password>\n", "identified by ", "identified by '", "eyJ", "eyJ.", "eyJa.eyJ",
    "ghp_", "sk_live_",
    "token -> ", "token ->", "(a.token,", "(token.", "spark.token ", "spark.", '"name": "token", "value": ',
    '"name":',
    "<name>token</name><value>", "<name>token", "<name>",
    "db_pass", "db_pass: ", "passcode", "passcode=", "auth=", "auth=(", "auth=('", "auth=('\\",
    "auth=('u',", "auth=[\"", "auth: (E'", "nats://", "nats://a", "hooks.slack.com/services/",
    "hooks.slack.com", "hf_", "hf_a", "npm_aaaaaaa", "AIza", "AIza-", "dop_v1_", "curl", "curl ", "curl -u",
    "curl -u ", "curl -u/", "curl -u a:", "curl -u'", "curl -u \"", "curl\\\n", " -u", "-u=", "/-u", "-uu",
    "curl -u\\\n", "'curl', '-u', ", "mysql ", "mysql -p", "mysql -p'", "mysql-", "mysqlmysql", " -p'",
    "-p\"", "mysql -p\"", "sqlplus ", "sqlplus a/", "a/", " a/", "jdbc:oracle:", "jdbc:oracle:thin:",
    "jdbc:oracle:thin:a/", "jdbc:oracle:thin:a/\"", "h:5432:", "h:5432:a:b:", "h:5432:a:b:\n", " h:5432:a:",
    "*:*:*:", "*:", "'*:*:*:*:", "abc:", " abc:1234:",
)  # fmt: skip
SHORTER = 2_500


def seconds(look: Callable[[str], object], text: str) -> float:
    began = time.thread_time()
    look(text)
    return time.thread_time() - began


def growth(look: Callable[[str], object], text: str, behind: str = "") -> float:
    """How many times as long it takes when the text is doubled.

    The lowest of several measurements counts, since other processes use the machine too.
    """
    found: list[float] = []
    while len(found) < 4 and min(found, default=4.0) > 3:
        # What takes less than that is the clock.
        shorter = max(seconds(look, text + behind), 0.002)
        found.append(seconds(look, text * 2 + behind) / shorter)
    return min(found)


@pytest.mark.parametrize(
    "ends",
    [pytest.param(["@"], id="at sign"), pytest.param(["", "\n@", "="], marks=pytest.mark.soak, id="others")],
)
@pytest.mark.parametrize(
    "name", [look if n < 2 else pytest.param(look, marks=pytest.mark.soak) for n, look in enumerate(LOOKS)]
)
def test_the_time_for_known_repeated_texts_is_linear(
    name: str, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redaction, "SEARCHED_CHARACTERS", 1 << 30)
    for piece in REPEATED:
        for end in ends:
            assert growth(LOOKS[name], piece * (SHORTER // len(piece)), end) <= 3, (piece, end)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join))
def test_the_time_for_any_repeated_text_is_linear(piece: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redaction, "SEARCHED_CHARACTERS", 1 << 30)
        for look in (redact, LOOKS["sentence"]):
            assert growth(look, piece * (SHORTER // len(piece))) <= 3
