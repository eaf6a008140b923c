#!/bin/sh
# Installs Chromium for the tests of the console and of `neptrio trace view` where it may (root with apt).
# Nothing here is required: without a browser those tests are skipped, saying so.
set -u
for name in chromium chromium-browser google-chrome google-chrome-stable firefox firefox-esr; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing chromium (for tests of the console and of trace pages)"
    install() { timeout 150 apt-get install -y -qq --no-install-recommends chromium; }
    { install || { timeout 60 apt-get update -qq && install; }; } >/dev/null 2>&1 && exit 0
fi
echo "no browser is installed: the tests that draw the console and trace pages will be skipped"
