#!/bin/sh
# A Chromium for the tests of HTML pages, where there is none: from Debian's packages, the only thing here that needs root.
# Nothing is done if one is found, by POISE_CHROMIUM or by its usual names (those of tests/chromium.py).
set -eu

for name in "${POISE_CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable; do
    if [ -n "$name" ] && command -v "$name" >/dev/null; then exit 0; fi
done

root=
if [ "$(id -u)" != 0 ]; then root="sudo -n"; fi
if ! command -v apt-get >/dev/null || { [ -n "$root" ] && ! $root true 2>/dev/null; }; then
    echo "The pages' tests need Chromium or Chrome: install one, or name one in POISE_CHROMIUM." >&2
    exit 1
fi
echo "Installing Chromium, which the tests of HTML pages drive"
$root apt-get update -qq
DEBIAN_FRONTEND=noninteractive $root apt-get install -y -qq --no-install-recommends chromium >/dev/null
