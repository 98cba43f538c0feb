#!/usr/bin/env bash
# ensure_chromium.sh: print the path of a Chromium or Chrome, for the tests of the monitor page; install one on Debian when root.
set -euo pipefail

say() { printf '%s\n' "$*" >&2; }

find_chromium() {
    local name
    if [ -n "${PENSTOCK_TEST_CHROMIUM:-}" ] && [ -x "$PENSTOCK_TEST_CHROMIUM" ]; then
        printf '%s\n' "$PENSTOCK_TEST_CHROMIUM"
        return 0
    fi
    for name in chromium chromium-browser google-chrome-stable google-chrome \
        "/Applications/Chromium.app/Contents/MacOS/Chromium" \
        "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"; do
        command -v "$name" && return 0
    done
    return 1
}

install_chromium() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    # Ubuntu's package of this name is a snap, which runs in no container.
    grep -qx 'ID=debian' /etc/os-release 2>/dev/null || return 1
    say "No Chromium: installing one"
    apt-get update -qq >&2 || return 1
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-liberation >&2
}

find_chromium && exit
if install_chromium && find_chromium; then
    exit
fi
say "The tests of the monitor page want Chromium or Chrome, and none was found. Install one:"
say "  Debian: apt-get install chromium"
say "  Fedora: dnf install chromium"
say "  macOS:  brew install --cask chromium"
say "or point PENSTOCK_TEST_CHROMIUM at one that you have."
exit 1
