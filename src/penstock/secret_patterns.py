"""Patterns for passwords, keys and tokens in texts; the first group of each pattern is kept.

Compiling them takes longer than starting a command, so they are imported when the first text is redacted. A
text may come from other programs, so every pattern takes time proportional to its length.

The last alternative of a group that is repeated possessively never matches, as in ``(?:…|(?!))*+``. Python
before 3.11.5 needs it: without another alternative to try, it does not return to the start of a repetition
that fails after its first characters (CPython issue 106052).
"""

from __future__ import annotations

import re

_PEM = r"[A-Z0-9 ]{0,40}?PRIVATE KEY(?: BLOCK)?-----"
PRIVATE_KEY = re.compile(rf"(-----BEGIN {_PEM}).*?(?=-----END {_PEM}|\Z)", re.DOTALL)
# With the prefix of a literal in SQL or Python. An unterminated literal is redacted to the end of the text.
_QUOTED = (
    r"""(?:(?:[BEFNRUX]|[BR]{2}|U&)?(?:"(?:[^"\\]|\\.|(?!))*+"?|'(?:[^'\\]|\\.|(?!))*+'?)"""
    r"""|\$\w*+\$[^$]*+(?:\$\w*+\$|(?!))?+)"""
)
# JSON inside JSON has backslashes before its quotes.
_ESCAPED = r"""(?:\\++["'][^"'\\]*+(?:\\++["']|(?!))?+)"""


# Excludes names such as password_file and password_env, whose value is kept.
_OF_NO_PLACE = r"(?<!_file)(?<!_env)"


def _named(words: str) -> str:
    """Return a pattern for a name that contains one of the words, with the quote around it."""
    return rf"""(?<![\w.?&-])(?=[\w.-]*?(?:{words}))[\w.-]++{_OF_NO_PLACE}\\*+["']?+[ \t]*+"""


# A quoted value, as in JSON and SQL, ends with its quote. Any other value may contain blanks, as in libpq's
# keyword strings and in YAML, so it is redacted to the end of the line, which in YAML may be the next line.
_PASSWORD = re.compile(
    rf"({_named('password|passphrase')}(?::[ \t]*+|(?!))?+){_QUOTED}"
    rf"|({_named('password|passphrase')}:[ \t]*+(?:[|>][+-]?+|(?!))?+\r?\n[ \t]++)[^\n]*"
    rf"|({_named('password|passphrase')}[=:])[^\n]*",
    re.IGNORECASE | re.DOTALL,
)
# The first line has names that are also options of commands. The next ones are headers such as
# Ocp-Apim-Subscription-Key, but not the keys of tables. The last name is from Azure's signed URLs; as part of
# a longer word it means something else.
_OPTIONS = (
    "secret|token|credential|passwd|pwd|passcode"
    "|(?:access|api|private|account|storage|master|customer)[._-]?key"
)
# Names such as db_pass; other names with this ending, such as forward_pass, mean a pass over data.
_PASS_OF = (
    "db", "database", "user", "admin", "root", "mysql", "mariadb", "postgres", "postgresql", "pg", "sql",
    "oracle", "mongo", "redis", "rabbitmq", "smtp", "mail", "ftp", "ssh", "ldap", "http", "proxy", "auth",
    "login", "account", "service", "app", "api", "key", "store", "ssl", "tls",
)  # fmt: skip
# It is much faster to search for the rare word first, and then check the text before it.
_PASS = rf"pass(?![\w.-])(?:{'|'.join(f'(?<={word}pass)|(?<={word}[._-]pass)' for word in _PASS_OF)})"
_KEYS = (
    rf"{_OPTIONS}|authorization|signature"
    rf"|{_PASS}"
    r"|(?<!primary)(?<!foreign)(?<!partition)(?<!sort)(?<!row)(?<!public)(?<!unique)-key(?![\w.-])"
    r"|(?:(?<![^\W_])|(?<=%26|%3F))sig(?![^\W_])"
)
_SECRETS = f"password|passphrase|{_KEYS}"
_OTHER = re.compile(
    rf"({_named(_KEYS)}[=:]\s*+(?:(?:bearer|basic)\s++|(?!))?+)(?:{_QUOTED}|{_ESCAPED}|[^\s,;&)}}\]]+)",
    re.IGNORECASE | re.DOTALL,
)
IN_QUERY = re.compile(
    rf"([?&](?=[\w.-]{{0,100}}?(?:password|{_KEYS}))[\w.-]{{1,200}}{_OF_NO_PLACE}=)[^\s&'\")]*", re.IGNORECASE
)
# Headers whose whole value is secret, to the end of the line unless it is quoted with its name.
_HEADER_NAME = r"(?<![\w.?&-])(?:(?:proxy-)?authorization|(?:set-)?cookie)"
_HEADER = re.compile(
    rf"""((?<=["']){_HEADER_NAME}["'][ \t]*+[=:][ \t]*+){_QUOTED}"""
    rf"""|({_HEADER_NAME}\\*+["']?+[ \t]*+[=:][ \t]*+)[^\n]+""",
    re.IGNORECASE | re.DOTALL,
)
# The value of an option that names a file or a variable is kept.
_OPTION_NAME = (
    rf"--?+(?!no-)(?=[\w.-]*?(?:password|passphrase|{_OPTIONS}))[\w.-]++"
    r"(?<!file)(?<!path)(?<!dir)(?<!env)(?<!name)(?<!id)(?<!url)"
)
# A name and its value in a tuple or a list of two, and an option and its value in the list of a command.
_PAIR = re.compile(
    rf"""([(\[]\s*+[bu]?["'](?=[\w.-]*?(?:password|passphrase|cookie|{_KEYS}))[\w.-]++["']\s*+,\s*+)"""
    rf"""{_QUOTED}(?=\s*+(?:[)\]]|\Z))"""
    rf"""|(["']{_OPTION_NAME}["']\s*+,\s*+){_QUOTED}"""
    # A user and a password in the form that Python's HTTP clients take.
    rf"""|((?<![^\W_])auth["']?+\s*+[=:]\s*+[(\[]\s*+{_QUOTED}\s*+,\s*+){_QUOTED}""",
    re.IGNORECASE | re.DOTALL,
)
# Words that may follow a name in a sentence or in a usage message.
_WORD = (
    r"(?:[-<]|(?:a|an|and|are|as|at|because|but|by|can|cannot|does|for|from|has|have|if|in|instead|is|it|may|must"
    r"|needs?|not|of|on|options?|or|password|requires?|secret|should|takes|than|that|the|to|token|was|were|when"
    r"|which|with|without)(?![^\s.,;:!?)\]]))"
)
# An option with its value, and a setting of Spark with its value, as in spark-defaults.conf.
_SETTING_NAME = rf"spark\.(?=[\w.-]*?(?:password|{_OPTIONS}))[\w.-]++{_OF_NO_PLACE}"
_OPTION = re.compile(
    rf"((?<![\w.?&-])(?:{_OPTION_NAME}|{_SETTING_NAME})[ \t]++)"
    rf"(?!{_WORD}|[=:,]|->)(?:{_QUOTED}|\S++)",
    re.IGNORECASE | re.DOTALL,
)
# A map and a tuple of Scala, and an object or an element with a name and a value.
_ENTRY = re.compile(
    rf"({_named(_SECRETS)}->[ \t]*+)[^\s,;)}}\]]++"
    rf"|(\((?=[\w.-]*?(?:{_SECRETS}))[\w-]++[.][\w.-]++{_OF_NO_PLACE},)[^\s,)]++"
    rf"""|(["']name["']\s*+:\s*+["'](?=[\w.-]*?(?:{_SECRETS}))[\w.-]++["']\s*+,\s*+["']value["']\s*+:\s*+)"""
    rf"{_QUOTED}"
    rf"|(<name>\s*+(?=[\w.-]*?(?:{_SECRETS}))[\w.-]++\s*+</name>\s*+<value>)[^<]++",
    re.IGNORECASE | re.DOTALL,
)
# Percent-encoded as part of a URL, even twice; the value ends with an encoded &.
ENCODED = re.compile(
    rf"""((?<![\w.-])(?=[\w.-]*?(?:{_SECRETS}))[\w.-]++%(?:25|(?!))*+3D)"""
    r"""(?:[^\s&'")%]|%(?!(?:25|(?!))*+26)|(?!))*+""",
    re.IGNORECASE,
)
# A header's value without its name, which may be cut off, and libpq's variable as some programs print it.
# Words of a sentence are not secrets.
_ALONE = re.compile(
    r"(\b(?i:bearer)[ \t]++)(?:[\w.~+/=-]{8,}+|[\w.~+/=-]++\Z)"
    r"|(\bPGPASSWORD[ \t]++)(?!(?:and|for|from|in|is|or|to)\b)\S++"
    # A user's password in MySQL and Oracle, and the password in a setting such as DB_PASS.
    rf"|(\b(?i:identified[ \t]++by[ \t]++(?:password[ \t]++|(?!))?+))(?i:{_QUOTED})"
    r"|(\b(?i:user[ \t]++[\w.@%-]++[ \t]++identified[ \t]++by[ \t]++))[^\s;]++"
    r"|((?<![^\W_])(?i:pass)=)[^\s,;&)}\]]++"
)
# Tokens that are recognised by their beginning: GitHub, GitLab, Slack, Stripe, OpenAI, DigitalOcean, and JSON
# Web Tokens. Tokens of Hugging Face, npm and Google are also recognised by their length, since names such as
# npm_config_cache begin in the same way. The last ones are Slack's webhooks.
_TOKEN = re.compile(
    r"(\b(?:gh[oprsu]_|github_pat_|glpat-|xox[abeprs]-|[rs]k[-_](?:live|proj|test|ant)[-_]|do[opr]_v1_"
    r"|eyJ(?=[\w-]*+\.eyJ)))[\w.-]++"
    r"|(\b(?:hf|npm)_)[A-Za-z0-9]{20,}+"
    r"|(\bAIza)[\w-]{20,}+"
    r"""|(hooks\.slack(?:-gov)?\.com(?:/|%2F)(?:services|triggers|workflows)(?:/|%2F))[^\s"'<>)\]&,;]++"""
)
# Passwords that are recognised only in the arguments of a command: a pattern for the command and the rest of
# its line, including continued lines, and one for the passwords there.
_COMMAND = r"""(?<![\w.-]){}(?:\.exe)?(?=[\s"'])(?:[^\n\\]|\\.|(?!))*+"""
# Separators between an option and its value, also in a list of arguments.
_GAP = r"""(?:["']?+[ \t]*+,[ \t]*+|=|[ \t]|\\\r?\n|(?!))*+"""
_CURL_USER = rf"(?<![\w-])(?:-[A-Za-z]{{0,6}}?[uU]|--(?:proxy-)?user){_GAP}"
_CURL_FORMS = (
    rf"""({_CURL_USER}"[^":]{{0,256}}+:)[^"]++""",
    rf"""({_CURL_USER}'[^':]{{0,256}}+:)[^']++""",
    rf"""({_CURL_USER}[^\s:"']{{0,256}}+:(?!//))[^\s"',\]]++""",
)
IN_COMMANDS = [
    (re.compile(_COMMAND.format(names), re.DOTALL), re.compile(secret))
    for names, secret in (
        ("curl", "|".join(_CURL_FORMS)),
        # "-p" and a blank are followed by the name of a database. A number and a colon are Docker's ports.
        (
            "(?:mysql|mariadb)[a-z-]{0,16}",
            r"""((?<![\w-])-p)(?!\d++:)(?:"[^"]++"?|'[^']++'?|[^\s"'.,;:)\]][^\s"',\]]*+)""",
        ),
        (
            "(?:sqlplus|sqlldr|expdp|impdp|rman)",
            r"""((?<![^\s"'=])[A-Za-z][\w$#]{0,127}+/)[^\s/@"']{1,128}+(?=@|\Z)""",
        ),
    )
]
_ORACLE_URL = re.compile(r"""(\bjdbc:oracle:[a-z0-9]{1,8}:[^\s/@:"']{1,128}+/)(?:"[^"]++"?|[^\s@"',;)]++)""")
# A line of a pgpass file. IPv6 addresses look similar.
_PGPASS_FIELDS = (
    r"(?![0-9A-Fa-f:]*+(?![\w*.-]))"
    r"""[^\s:"'`]{1,255}+:(?:\d{4,5}|\*):(?:[A-Za-z_][\w.$-]{0,62}+|\*):(?:[A-Za-z_][\w.@$-]{0,62}+|\*):"""
)
_PGPASS = re.compile(
    rf"""(^{_PGPASS_FIELDS})[^\s][^\r\n]*+|((?<=[\s"'`]){_PGPASS_FIELDS})[^\s"'`]++""", re.MULTILINE
)
# An XML element. A usage message also has names in such brackets.
_XML = re.compile(
    rf"(<(?=[\w:.-]*?(?:password|passphrase|{_OPTIONS}))[\w:.-]++[^<>/]*+>)"
    r"(?:(?![\s\])|])[^<]++|[ \t\r]*+\n[^<]++(?=</|<?\Z))",
    re.IGNORECASE,
)
PATTERNS = (
    _PGPASS, _ORACLE_URL, _ENTRY, _XML, _PAIR, _PASSWORD, _HEADER, _OTHER, _OPTION, _ALONE, _TOKEN,
)  # fmt: skip
