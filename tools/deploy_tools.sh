#!/bin/sh
# Installs what `make test-deploy` uses beside Python packages, where it may (root with apt); what is missing is
# named, and the tests of it are skipped.
set -u
PATH="$PATH:/usr/sbin"
missing=""
command -v promtool >/dev/null 2>&1 || missing="prometheus"
command -v nginx >/dev/null 2>&1 || missing="$missing nginx-light"
if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing $missing"
    { apt-get install -y -qq --no-install-recommends $missing ||
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing; }; } >/dev/null 2>&1
fi
command -v promtool >/dev/null 2>&1 || echo "promtool is not installed (Debian: prometheus): the rules are not tested"
command -v nginx >/dev/null 2>&1 || echo "nginx is not installed: the balancer is not tested"
