#!/usr/bin/env bash
# ensure_pgbouncer.sh: print the path of pgbouncer, for the tests: the system's own, else Debian's, unpacked into .pgbouncer
# without being installed, so that no service is started.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }

works() { [ -x "$1" ] && LD_LIBRARY_PATH="$(libraries)" "$1" --version >/dev/null 2>&1; }
libraries() { printf '%s' "$PWD/.pgbouncer/usr/lib/$(uname -m)-linux-gnu"; }

system=$(PATH=$PATH:/usr/sbin command -v pgbouncer || true)
if [ -n "$system" ] && "$system" --version >/dev/null 2>&1; then
    printf '%s\n' "$system"
    exit
fi

unpacked=$PWD/.pgbouncer/usr/sbin/pgbouncer
if ! works "$unpacked"; then
    if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
        say "pgbouncer was not found, and it is unpacked only from Debian's packages: install it"
        exit 1
    fi
    say "Unpacking pgbouncer into .pgbouncer"
    # In a folder of its own first, as others may do the same at this moment.
    own=$(mktemp -d .pgbouncer-XXXXXX)
    trap 'rm -rf "$own"' EXIT
    packages=(pgbouncer libc-ares2 libevent-2.1-7)
    # Debian's lists of packages may be missing, or too old for its server.
    (cd "$own" && { apt-get download -qq "${packages[@]}" || { apt-get update -qq && apt-get download -qq "${packages[@]}"; }; }) >&2
    for package in "$own"/*.deb; do dpkg -x "$package" "$own"; done
    rm "$own"/*.deb
    if ! works "$unpacked"; then
        rm -rf .pgbouncer
        mv -T "$own" .pgbouncer 2>/dev/null || true
    fi
    works "$unpacked" || { say "pgbouncer from Debian does not run here: install it" && exit 1; }
fi
printf '%s\n' "$unpacked"
