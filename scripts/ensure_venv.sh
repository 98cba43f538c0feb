#!/usr/bin/env bash
# ensure_venv.sh DIRECTORY demo|dev|docs [PYSPARK_VERSION]: a virtual env with Penstock, editable, and what the demo or
# everything needs; or with what builds the documentation site. Does nothing if it exists and the requirements have not changed since.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1 purpose=$2 spark=${3:-}
stamp=$venv/.penstock-installed
demo=examples/flights/requirements.txt
site=scripts/site_requirements.txt

case $purpose in
demo) wanted=(--editable '.[spark,cli]' --requirement "$demo") ;;
dev) wanted=(--editable '.[dev]') ;;
docs) wanted=(--requirement "$site") ;;
*) echo "usage: $0 DIRECTORY demo|dev|docs [PYSPARK_VERSION]" >&2 && exit 2 ;;
esac

say() { printf '%s\n' "$*" >&2; }

# Python 3.11 or newer. Run it: a version manager's shim may be on PATH with nothing behind it.
recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
complete() { recent "$1" && "$1" -c 'import ensurepip, venv' 2>/dev/null; }

candidates() { printf '%s\n' ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; }

first() { # first CHECK: the first candidate that passes it
    local python
    for python in $(candidates); do
        if command -v "$python" >/dev/null && "$1" "$python"; then
            command -v "$python"
            return 0
        fi
    done
    return 1
}

find_python() {
    first complete && return
    local python package
    if ! python=$(first recent); then
        say "Penstock needs Python 3.11 or newer; tried: $(candidates | tr '\n' ' ')"
        say "  Debian/Ubuntu: apt-get install python3 python3-venv"
        say "  Fedora:        dnf install python3.12"
        say "  macOS:         brew install python@3.12"
        say "or name one: make PYTHON=/path/to/python3.12 ..."
        return 1
    fi
    # Debian keeps ensurepip in a package of its own.
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "$python has no venv module; installing $package"
        apt-get update -qq >&2
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" >&2
        first complete && return
    fi
    say "$python cannot make virtual environments; on Debian/Ubuntu: apt-get install $package"
    return 1
}

want="$(cat pyproject.toml "$demo" "$site" | cksum) $spark"
have() { [ -x "$venv/bin/python" ] && "$venv/bin/python" -c '' 2>/dev/null && grep -qxF "$1 $want" "$stamp" 2>/dev/null; }

# dev includes what the demo needs.
if have dev || have "$purpose"; then
    exit 0
fi

if ! { [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
    python=$(find_python)
    say "Making $venv with $python ($("$python" --version))"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

say "Installing Penstock for $purpose${spark:+ with PySpark $spark} into $venv (some minutes the first time)"
rm -f "$stamp"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check \
    "${wanted[@]}" ${spark:+"pyspark[sql]==$spark"}
printf '%s\n' "$purpose $want" >"$stamp"
