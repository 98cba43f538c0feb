"""Store URLs: parse them, and show them without passwords."""

from __future__ import annotations

import os
import re
import shlex
import stat
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import parse_qsl, quote, unquote, urlencode

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidUrlError, StoreError, StoreUnsafeError
from penstock.redaction import without

_URL_FORMS = (
    "sqlite:///relative.db, sqlite:////absolute.db or postgresql://user@host/database?schema=penstock"
)
_MAX_PASSWORD_LENGTH = 65_535
_SQLITE_OPTIONS = ("synchronous", "busy_timeout", "mode", "trust")
CONNECTION_OPTIONS = ("direct", "password_env", "password_file")
"""Penstock's own options for connecting to the server."""
_POSTGRES_OPTIONS = ("schema", "lock_wait", "owner", *CONNECTION_OPTIONS)
_SYNCHRONOUS = ("full", "normal")
_TRUST = ("own", "folder")
_FILE_MODE = re.compile(r"0?[0-7]{3}")
_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0}
_TIME = re.compile(r"([0-9]{1,6})(ms|s|min)")
_SCHEMES = {"sqlite": "sqlite", "postgresql": "postgres", "postgres": "postgres"}
_HOST = re.compile(r"(\[[^\]]*\]|[^:=\s]*)(:\d*)?")
_LINE_END = re.compile(r"(?<=[^\s.:,;?!])\s*\n")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# A libpq keyword string may contain a password anywhere, with blanks around the =, in quotes, or with
# escapes.
_PASSWORD_KEYWORD = re.compile(r"((?:ssl)?password).*", re.IGNORECASE | re.DOTALL)
_PLAIN_PATH = re.compile(r"[\w./\\~-]*")
# The query parameters that may be shown, since they hold no secrets.
_VISIBLE_PARAMETERS = (
    "host",
    "hostaddr",
    "port",
    "dbname",
    "user",
    "service",
    "sslmode",
    "target_session_attrs",
    "schema",
    "owner",
    *CONNECTION_OPTIONS,
)
_SECRET_PARAMETERS = ("password", "sslpassword")


@dataclass(frozen=True)
class StoreUrl:
    """A parsed store URL. Its text form hides the password."""

    dialect: str
    target: str = field(repr=False)
    """The absolute path of the SQLite file, or the libpq URL."""
    schema: str
    redacted: str
    options: dict[str, str] = field(default_factory=dict)
    owners: tuple[str, ...] = ()
    """Other roles that the user trusts to own the schema and the tables that Penstock writes."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Texts that must not appear in any message."""

    def __str__(self) -> str:
        return self.redacted

    @property
    def pooled(self) -> bool:
        """Whether the host is a pooler that shares connections between transactions."""
        return "direct" in self.options

    def password(self) -> dict[str, Any]:
        """Read the password from its environment variable or file, and return it as a connection parameter.

        Raises
        ------
        StoreError
            ``STORE_ERROR.NO_PASSWORD`` if there is no password.
        StoreUnsafeError
            If other users can read or write the file with the password.
        """
        variable, file = self.options.get("password_env"), self.options.get("password_file")
        if variable is not None:
            password = os.environ.get(variable, "").rstrip("\r\n")
            location = f"the environment variable {in_quotes(variable)}"
        elif file is not None:
            location = f"the file {in_quotes(file)}"
            try:
                # Editors end the last line with a newline.
                with open(file, encoding="utf-8", opener=_open_nonblocking) as stream:
                    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                        raise _no_password(self, f"{location} is not a regular file")
                    _require_private(self, file, stream.fileno())
                    password = stream.read(_MAX_PASSWORD_LENGTH + 1).rstrip("\r\n")
            except (OSError, ValueError) as error:
                raise _no_password(self, f"{location} cannot be read ({type(error).__name__})") from None
        else:
            return {}
        if not password:
            raise _no_password(self, f"{location} is empty or does not exist")
        if len(password) > _MAX_PASSWORD_LENGTH or "\0" in password:
            raise _no_password(self, f"{location} does not contain a valid password")
        return {"password": password}

    def direct(self) -> dict[str, Any]:
        """Return connection parameters that bypass the pooler."""
        if not self.pooled:
            return {}
        match = _HOST.fullmatch(self.options["direct"])
        assert match is not None
        port = (match[2] or "").lstrip(":") or "5432"
        return {"host": match[1].strip("[]"), "hostaddr": None, "port": port}

    def without_secrets(self, text: str) -> str:
        """Return the text without the URL's secrets, as one line, with a full stop after each former line."""
        for secret in self.secrets:
            text = without(text, secret)
        return " ".join(_LINE_END.sub(". ", text.strip()).split())


def parse_url(url: str) -> StoreUrl:
    """Parse a store URL.

    Options of ``sqlite:///file``, with their defaults:

    * ``synchronous=full``, or ``normal``;
    * ``busy_timeout=60000``, in milliseconds;
    * ``mode=0600``, the mode of a created file;
    * ``trust=own``, or ``folder``, which trusts everyone who may write in the store's folder.

    Options of ``postgresql://…``, with their defaults:

    * ``schema=penstock``;
    * ``owner``: another role that may own the schema and the tables of sinks; it may be repeated;
    * ``lock_wait=60s``;
    * ``direct``: the server's own ``host:port``, if the host is a pooler that shares connections between
      transactions;
    * ``password_env``: an environment variable with the password, or ``password_file``: a file with it that
      other users cannot read. Both are read each time a connection is opened.

    All other query parameters are libpq's.
    """
    if not isinstance(url, str) or not _SCHEME.match(url):
        raise InvalidUrlError(f"a store URL is one of {_URL_FORMS}, not {_redacted(url)}")
    if "\0" in url:
        raise InvalidUrlError("a store URL may not contain NUL")
    scheme = url.split("://", 1)[0].lower()
    if scheme not in _SCHEMES:
        raise InvalidUrlError(
            f"stores are sqlite or postgresql, not {in_quotes(scheme)}: use one of {_URL_FORMS}",
            condition="INVALID_URL.UNKNOWN_KIND",
            scheme=scheme,
        )
    return _sqlite(url) if _SCHEMES[scheme] == "sqlite" else _postgres(url)


def _redacted(url: object) -> str:
    text = str(url)
    if not _SCHEME.match(text) and not _PLAIN_PATH.fullmatch(text):
        return "this one, which is not shown since it may contain a password"
    _, at, rest = text.rpartition("@")
    return repr(_PASSWORD_KEYWORD.sub(r"\1***", f"***@{rest}" if at else text))


def _sqlite(url: str) -> StoreUrl:
    rest = url.split("://", 1)[1]
    path, _, query = rest.partition("?")
    if not path.startswith("/") or path == "/":
        raise InvalidUrlError(
            f"{_redacted(url)} has no file name: write sqlite:///relative.db or sqlite:////absolute.db",
            condition="INVALID_URL.MISSING_PART",
        )
    if path == "/:memory:":
        raise InvalidUrlError(
            "a store outlives its process, so it cannot be in memory: name a file",
            condition="INVALID_URL.MISSING_PART",
        )
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in _SQLITE_OPTIONS:
            raise InvalidUrlError(
                f"unknown SQLite option {in_quotes(name)}.{did_you_mean(name, _SQLITE_OPTIONS)} A SQLite "
                f"URL has {', '.join(_SQLITE_OPTIONS)}",
                condition="INVALID_URL.UNKNOWN_PARAMETER",
                option=name,
            )
    if options.get("synchronous", "full") not in _SYNCHRONOUS:
        raise InvalidUrlError(
            f"synchronous is full or normal, not {in_quotes(options['synchronous'])}",
            condition="INVALID_URL.VALUE",
        )
    if not re.fullmatch(r"[0-9]{1,9}", options.get("busy_timeout", "0")):
        raise InvalidUrlError(
            f"busy_timeout is a number of milliseconds, not {in_quotes(options['busy_timeout'])}",
            condition="INVALID_URL.VALUE",
        )
    if options.get("trust", "own") not in _TRUST:
        raise InvalidUrlError(
            f"trust is own or folder, not {in_quotes(options['trust'])}",
            condition="INVALID_URL.VALUE",
            option="trust",
        )
    _require_mode(options.get("mode", "0600"))
    target = os.path.abspath(unquote(path[1:]))
    # Encode only characters that would end the path, to keep the URL readable.
    encoded = re.sub(r"[%?]", lambda match: quote(match[0]), target)
    return StoreUrl("sqlite", target, "main", f"sqlite:///{encoded}", options)


def _require_mode(mode: str) -> None:
    bits = int(mode, 8) if _FILE_MODE.fullmatch(mode) else 0
    if bits & 0o600 != 0o600 or bits & 0o111:
        raise InvalidUrlError(
            "mode must let the owner read and write, such as 0600 or 0640, and no one execute, not "
            f"{in_quotes(mode)}",
            condition="INVALID_URL.VALUE",
            option="mode",
        )


def file_mode(url: StoreUrl) -> int:
    """Return the mode with which a store's SQLite file is created."""
    return int(url.options.get("mode", "0600"), 8)


def trusts_folder(url: StoreUrl) -> bool:
    """Whether everyone who may write in a SQLite store's folder is trusted."""
    return url.options.get("trust") == "folder"


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without waiting: opening a named pipe would otherwise wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _no_password(url: StoreUrl, why: str) -> StoreError:
    return StoreError(
        f"{url}: {why} on this machine: the driver and each executor need it",
        condition="STORE_ERROR.NO_PASSWORD",
    )


def _require_private(url: StoreUrl, path: str, file: int) -> None:
    """Refuse a password file that its group can write or other users can access."""
    mode = stat.S_IMODE(os.fstat(file).st_mode)
    # The group may read the file, since secrets are mounted that way for users other than root.
    if not mode & (stat.S_IWGRP | stat.S_IRWXO):
        return
    raise StoreUnsafeError(
        f"{url}: others can {'write' if mode & 0o022 else 'read'} the file {in_quotes(path)}, which has the "
        f"password (mode {mode:04o}): run chmod 0600 {shlex.quote(path)}; for a mounted secret, set the mode "
        "0440 where it is mounted",
        condition="STORE_UNSAFE.PASSWORD_FILE",
        file=path,
        mode=f"{mode:04o}",
    )


def with_options(url: StoreUrl, **options: str) -> str:
    """Return the URL of a SQLite store with its own options and ``options``."""
    query = urlencode({**url.options, **options})
    return f"{url.redacted}?{query}" if query else url.redacted


def _postgres(url: str) -> StoreUrl:
    rest = url.split("://", 1)[1]
    authority, path, query = _split_url(rest)
    credentials, at, hosts = authority.rpartition("@")
    if not all(map(_is_address, hosts.split(","))):
        # The text is not shown, since it may be a password without a host.
        raise InvalidUrlError(
            "the part after the host of a PostgreSQL URL must be a colon and a port number of at most 65535, "
            "as in postgresql://user@host:5432/database"
        )
    user, _, password = credentials.partition(":")
    if "@" in user:
        # Most likely a password, with an @ typed instead of a colon.
        _refuse_unencoded()
    parameters = parse_qsl(query, keep_blank_values=True)
    schema = dict(parameters).get("schema") or "penstock"
    if "\0" in schema or len(schema.encode(errors="replace")) > 63:
        raise InvalidUrlError(
            "a PostgreSQL schema's name has 1 to 63 bytes", condition="INVALID_URL.VALUE", schema=schema
        )
    visible = [(name, value) for name, value in parameters if name in _VISIBLE_PARAMETERS]
    if any(re.search(r"password\s*=", text, re.IGNORECASE) for text in (user, path, *dict(visible).values())):
        raise InvalidUrlError(
            "the PostgreSQL URL has a password where none belongs: write it between a colon and the @, after "
            "the user"
        )
    options = {"schema": schema, **_lock_wait(dict(parameters)), **_direct(dict(parameters))}
    options |= _password_option(dict(parameters), password)
    libpq = [(name, value) for name, value in parameters if name not in _POSTGRES_OPTIONS]
    encoded = quote(unquote(password), safe="")
    secrets = {
        password,
        encoded,
        unquote(password),
        *(value for name, value in parameters if name in _SECRET_PARAMETERS),
    }
    return StoreUrl(
        "postgres",
        f"postgresql://{user}{':' if password else ''}{encoded}{at}{hosts}{path}{_query_string(libpq)}",
        '"' + schema.replace('"', '""') + '"',
        f"postgresql://{user}{at if user else ''}{hosts}{path}{_query_string(visible)}",
        options,
        tuple(value for name, value in parameters if name == "owner" and value),
        tuple(sorted(filter(None, secrets), key=len, reverse=True)),
    )


def _lock_wait(parameters: dict[str, str]) -> dict[str, str]:
    wait = parameters.get("lock_wait")
    if wait is None:
        return {}
    if not _TIME.fullmatch(wait) or not seconds(wait):
        raise InvalidUrlError(
            f"lock_wait is a duration with its unit, such as 30s, 500ms or 2min, not {in_quotes(wait)}",
            condition="INVALID_URL.VALUE",
            option="lock_wait",
        )
    return {"lock_wait": wait}


def _direct(parameters: dict[str, str]) -> dict[str, str]:
    direct = parameters.get("direct")
    if direct is None:
        return {}
    if not _is_address(direct) or direct.startswith(":") or not direct:
        raise InvalidUrlError(
            "direct is the host and port of the server itself, such as db:5432",
            condition="INVALID_URL.VALUE",
            option="direct",
        )
    return {"direct": direct}


def _password_option(parameters: dict[str, str], password: str) -> dict[str, str]:
    options: dict[str, str] = {
        name: parameters[name] for name in ("password_env", "password_file") if name in parameters
    }
    inline = [name for name in ("password", "passfile") if parameters.get(name)]
    sources = [*options, *inline, *(["password"] if password else [])]
    if options and len(sources) > 1:
        raise InvalidUrlError(
            f"a PostgreSQL URL may have only one source of its password, not {' and '.join(sources)}",
            condition="INVALID_URL.VALUE",
        )
    for name, source in options.items():
        if not source:
            raise InvalidUrlError(
                f"{name} is empty: write where the password is", condition="INVALID_URL.VALUE", option=name
            )
    return options


def seconds(text: str) -> float:
    """Convert a duration such as ``30s``, ``500ms`` or ``2min`` to seconds."""
    match = _TIME.fullmatch(text)
    assert match is not None
    return int(match[1]) * _UNITS[match[2]]


def _is_address(text: str) -> bool:
    """Return whether a text is a host, with or without a port."""
    match = _HOST.fullmatch(text)
    return match is not None and int((match[2] or "").lstrip(":") or 0) <= 65535


def _split_url(rest: str) -> tuple[str, str, str]:
    match = re.fullmatch(r"([^/?#]*)(/[^?#]*)?(?:\?([^#]*))?", rest, flags=re.DOTALL)
    if match is None:
        _refuse_unencoded()
    authority, path, query = match[1], match[2] or "", match[3] or ""
    if "@" in path or ("@" in query and "@" not in authority and "=" not in query.split("@")[0]):
        _refuse_unencoded()
    return authority, path, query


def _refuse_unencoded() -> NoReturn:
    raise InvalidUrlError(
        "the PostgreSQL URL has one of / ? # @ in its user or password, or an @ instead of the colon between "
        "them: write user, colon and password before the last @, with such characters percent-encoded (%2F "
        "for /)"
    )


def _query_string(parameters: list[tuple[str, str]]) -> str:
    return "?" + urlencode(parameters, quote_via=quote) if parameters else ""
