#!/usr/bin/env bash
# ensure_java.sh: print the home of a Java 17 or newer, which Spark needs; install one on Debian when root.
set -euo pipefail

MINIMUM=17

say() { printf '%s\n' "$*" >&2; }

# The major version of a java program: 17 for "17.0.15", 8 for "1.8.0_402"; nothing when it does not run.
major() { "$1" -version 2>&1 | sed -nE 's/.* version "(1\.)?([0-9]+).*/\2/p' | head -n 1; }

recent() {
    local version
    [ -x "$1" ] || return 1
    version=$(major "$1" || true)
    [ -n "$version" ] && [ "$version" -ge "$MINIMUM" ]
}

# Links resolved: /usr/bin/java is one, and its home is where it really lies. (readlink -f is missing on older macOS.)
home_of() {
    local path=$1 target
    while target=$(readlink "$path"); do
        case $target in
            /*) path=$target ;;
            *) path=$(dirname "$path")/$target ;;
        esac
    done
    (cd "$(dirname "$path")/.." && pwd -P)
}

candidates() {
    [ -z "${JAVA_HOME:-}" ] || printf '%s\n' "$JAVA_HOME/bin/java"
    command -v java || true
    if [ -x /usr/libexec/java_home ]; then
        /usr/libexec/java_home -v "$MINIMUM+" 2>/dev/null | sed 's|$|/bin/java|' || true
    fi
    printf '%s\n' /usr/lib/jvm/*/bin/java /opt/homebrew/opt/openjdk*/bin/java /usr/local/opt/openjdk*/bin/java
}

find_java() {
    local java
    while IFS= read -r java; do
        if recent "$java"; then
            # macOS: /usr/bin/java is a stub, whose real home java_home names.
            if [ "$java" = /usr/bin/java ] && [ -x /usr/libexec/java_home ]; then
                continue
            fi
            home_of "$java"
            return 0
        fi
    done < <(candidates)
    return 1
}

install_java() {
    local package
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    say "No Java $MINIMUM or newer: installing one"
    apt-get update -qq >&2 || return 1
    for package in openjdk-17-jre-headless openjdk-21-jre-headless default-jre-headless; do
        if DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >&2; then
            return 0
        fi
    done
    return 1
}

find_java && exit
if install_java && find_java; then
    exit
fi
say "Spark needs Java $MINIMUM or newer, and none was found (JAVA_HOME, PATH, /usr/lib/jvm). Install one:"
say "  Debian/Ubuntu: apt-get install openjdk-17-jre-headless    (or openjdk-21-jre-headless)"
say "  Fedora:        dnf install java-21-openjdk-headless"
say "  macOS:         brew install openjdk@17"
say "or point JAVA_HOME at one that you have."
exit 1
