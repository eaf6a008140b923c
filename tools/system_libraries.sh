#!/bin/sh
# Installs the headers of libnghttp2 where it may (root with apt); otherwise says what is missing.
# Nothing here is required: without the library gRPC is served over h2.
set -u
if printf '#include <nghttp2/nghttp2.h>\nint main(void){return 0;}\n' | cc -x c - -o /dev/null -lnghttp2 2>/dev/null; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing libnghttp2-dev (HTTP/2 for gRPC)"
    { apt-get install -y -qq libnghttp2-dev || { apt-get update -qq && apt-get install -y -qq libnghttp2-dev; }; } >/dev/null 2>&1 && exit 0
fi
echo "libnghttp2-dev is not installed: gRPC will be served over h2 (slower, same behaviour)"
