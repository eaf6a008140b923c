"""--cache-config: the server's own cache, and a library's settings."""

from __future__ import annotations

import pytest

from neptrio.scheduling.cache_config import CacheConfig, parse_config


def test_the_servers_own() -> None:
    assert parse_config("local,size=100") == CacheConfig("local", 100)
    assert parse_config(("local,size=100", "local,coalesce=true")) == CacheConfig("local", 100, True)
    assert parse_config("local,size=100,compiled=false") == CacheConfig("local", 100)


def test_a_librarys_settings_are_its_own_but_for_the_servers() -> None:
    one = parse_config(("redis,host=a,b:1,port=6379", "redis,timeout_ms=20", "redis,query=x=y,namespace=n"))
    settings = {"host": "a,b:1", "port": "6379", "query": "x=y"}
    assert one == CacheConfig("redis", compiled=True, timeout_ms=20, namespace="n", settings=settings)
    asked = parse_config("local,size=100,compiled=true,coalesce=true,restart_ms=7")
    assert asked == CacheConfig("local", coalesce=True, compiled=True, restart_ms=7, settings={"size": "100"})
    assert parse_config("redis") == CacheConfig("redis", compiled=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local", "size must be a positive number"),
        ("local,size=x", "got 'x'"),
        ("local,size=0", "got '0'"),
        ("local,size=1,colour=red", r"got \['colour'\]"),
        ("local,size=1,timeout_ms=5", r"got \['timeout_ms'\]"),
        ("local,size=1,coalesce=maybe", "got 'maybe'"),
        ("local,size=1,compiled=maybe", "compiled must be true or false, got 'maybe'"),
        ("size=1", "expected NAME,KEY=VALUE, got 'size=1'"),
        (",size=1", "expected NAME,KEY=VALUE"),
        ("redis,host", "expected NAME,KEY=VALUE, got 'redis,host'"),
        ("redis,timeout_ms=0", "timeout_ms must be a positive number of milliseconds up to 60000, got '0'"),
        ("redis,timeout_ms=60001", "got '60001'"),
        ("redis,restart_ms=-1", "got '-1'"),
        (("a,b=1", "b,b=1"), "there is one response cache, got 'a' and 'b'"),
    ],
)
def test_bad_settings(text: str | tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(text)
