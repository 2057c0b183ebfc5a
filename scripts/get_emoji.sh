#!/usr/bin/env bash
# Fetch the emoji images of the data sets emoji, emoji-google, emoji-twitter and emoji-fluent.
# Usage: scripts/get_emoji.sh [STYLE...]   (google, twitter, fluent; all by default)
# Writes to $FEDGIST_DATA/emoji, or ~/.cache/fedgist/emoji. Needs npm and about 150 MB of download.
# Licences: Google's images Apache-2.0, Twitter's CC-BY-4.0, Fluent's MIT, emoji.json MIT.
set -euo pipefail

declare -A package=(
    [google]=emoji-datasource-google@16.0.0
    [twitter]=emoji-datasource-twitter@16.0.0
    [fluent]=@lobehub/fluent-emoji-3d@1.1.0
)
declare -A hash=(
    [google]=fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438
    [twitter]=f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877
    [fluent]=c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58
)
declare -A images=([google]=package/img/google/64 [twitter]=package/img/twitter/64 [fluent]=package/assets)
labels_from=google # the package whose emoji.json is used; Twitter's is the same file

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 2
}

fetch() { # fetch STYLE: pack it once, check it, unpack it to $work/STYLE
    [ -d "$work/$1" ] && return
    say "Fetching ${package[$1]} ..."
    mkdir -p "$work/$1"
    local tarball
    tarball="$work/$(cd "$work" && npm pack --silent "${package[$1]}")"
    echo "${hash[$1]}  $tarball" | sha256sum --check --status ||
        fail "the SHA-256 of ${package[$1]} must be ${hash[$1]}. Got $(sha256sum <"$tarball")"
    tar -xzf "$tarball" -C "$work/$1"
}

command -v npm >/dev/null || fail "npm must be installed. Got none: apt-get install npm"
styles=("$@")
[ $# -gt 0 ] || styles=(google twitter fluent)
for style in "${styles[@]}"; do
    [ -n "${package[$style]:-}" ] || fail "a style must be google, twitter or fluent. Got '$style'"
done
out=${FEDGIST_DATA:-$HOME/.cache/fedgist}/emoji
mkdir -p "$out"
work=$(mktemp -d "$out/.fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT

if [ ! -f "$out/emoji.json" ]; then
    fetch "$labels_from"
    mv "$work/$labels_from/package/emoji.json" "$out/emoji.json"
fi
for style in "${styles[@]}"; do
    fetch "$style"
    rm -rf "${out:?}/$style"
    mv "$work/$style/${images[$style]}" "$out/$style"
done
say "Emoji (${styles[*]}) are in $out"
