#!/usr/bin/env bash
# ensure_page_modules.sh: the npm packages that the monitor page is built with, in frontend/node_modules.
# Does nothing when they are there and package-lock.json has not changed since.
set -euo pipefail
cd "$(dirname "$0")/../frontend"

stamp=node_modules/.penstock-installed

say() { printf '%s\n' "$*" >&2; }

if ! command -v npm >/dev/null || ! node -e 'process.exit(parseInt(process.versions.node) >= 20 ? 0 : 1)'; then
    say "The monitor page is built with Node.js 20 or newer, and its npm:"
    say "  Debian/Ubuntu: apt-get install nodejs npm    (where that is version 20 or newer)"
    say "  Fedora:        dnf install nodejs"
    say "  macOS:         brew install node"
    exit 1
fi

want=$(cksum <package-lock.json)
if [ "$want" = "$(cat "$stamp" 2>/dev/null)" ]; then
    exit 0
fi
say "Installing the packages of the monitor page into frontend/node_modules"
npm ci --silent --no-audit --no-fund >&2
printf '%s\n' "$want" >"$stamp"
