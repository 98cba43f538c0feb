"""Check that texts do not use words for which the project has better ones.

Source, documentation and commands speak the field's own terms: a consumer is caught up, a query resumes, a
table is recreated. Each rule is a pattern and what to write in its place.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = (
    "src/penstock/**/*.py",
    "src/penstock/**/*.sql",
    "docs/**/*.md",
    "*.md",
    "examples/**/*.py",
    "tests/**/*.py",
    "bench/**/*.py",
    "scripts/*.py",
    "frontend/src/**/*.ts*",
    "frontend/index.html",
)

WORDS = {
    r"ma[dk]es? anew|created anew": "recreated",
    r"\bin hand\b": "in flight",
    r"\bgo(?:es)? on with\b|\bgo(?:es)? on from\b|\bgo(?:es)? on where\b": "resume",
    r"\bare level\b|\bis level\b": "caught up",
    r"\bis told\b|\bare told\b|\btells? of\b": "report, say",
    r"\bwas told\b|\bwere told\b": "was given",
    r"\bways? out\b": "what to do",
    r"\bservice columns?\b": "metadata columns",
    r"\b(?:first|second) images?\b": "pre-image, post-image",
    r"\bupkeep\b": "maintenance",
    r"\bsweeps?\b|\bswept\b": "clean up",
    r"\bin silence\b|\bwithout a word\b": "silently, without warning",
    r"\b(?:runs|comes) to nothing\b": "is a no-op",
    r"\btells? (?:\w+ ){0,2}rows apart\b": "identify rows",
    r"\bnot be able to\b.*\bany more\b": "can no longer",
}
_RULES = [(re.compile(pattern, re.IGNORECASE), replacement) for pattern, replacement in WORDS.items()]


def main() -> int:
    """Print every use of such a word. Return 1 if there is one."""
    count = 0
    paths = {path for pattern in PATTERNS for path in ROOT.glob(pattern)} - {Path(__file__).resolve()}
    for path in sorted(paths):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for rule, replacement in _RULES:
                if match := rule.search(line):
                    print(f"{path.relative_to(ROOT)}:{number}: {match[0]!r}: write {replacement!r}")
                    count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
