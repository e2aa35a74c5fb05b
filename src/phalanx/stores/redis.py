"""A store in a Redis or Valkey server."""

from __future__ import annotations

import os
import secrets
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit

from phalanx.errors import (
    DistError,
    DistNetworkError,
    DistQueueEmptyError,
    DistStoreError,
    StoreTimeout,
)
from phalanx.extras import need
from phalanx.stores.base import DEFAULT_TIMEOUT, Store, Timeout, seconds

_KEPT = 7 * 24 * 3600  # seconds after the last change for which a server keeps what nobody removed
_ANSWER = 30.0  # seconds for which a server may be busy with others
_BRISK = 3.0  # and for those who would not wait longer
# A server that was cut off is found out: probes after 5 s without a word, and given up after 15 s.
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 5,
    socket.TCP_USER_TIMEOUT: 15_000,
}

# All keys of a store are the fields of one hash, KEYS[1], so that they can be counted, listed and
# removed. Whoever waits for a key listens to a channel, which every change of it is told to.
_CHANGED = """
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('PUBLISH', KEYS[1] .. ':' .. ARGV[2], '')
"""
_SET = """
for i = 2, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  redis.call('PUBLISH', KEYS[1] .. ':' .. ARGV[i], '')
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
"""
_ADD = f"""
if redis.call('HGET', KEYS[1], ARGV[2]) == '' then redis.call('HSET', KEYS[1], ARGV[2], '0') end
redis.call('HINCRBY', KEYS[1], ARGV[2], ARGV[3])
{_CHANGED}
return redis.call('HGET', KEYS[1], ARGV[2])
"""  # a number of Lua's has not all of 64 bits
_APPEND = f"""
local value = redis.call('HGET', KEYS[1], ARGV[2]) or ''
redis.call('HSET', KEYS[1], ARGV[2], value .. ARGV[3])
{_CHANGED}
"""
_COMPARE_SET = f"""
local value = redis.call('HGET', KEYS[1], ARGV[2])
if (value or '') ~= ARGV[3] then return value or ARGV[3] end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[4])
{_CHANGED}
return ARGV[4]
"""
# A queue is a list of its own, KEYS[2]; a set, KEYS[3], has the names of all that there were.
_PUSH = f"""
redis.call('RPUSH', KEYS[2], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[1])
redis.call('SADD', KEYS[3], KEYS[2])
redis.call('EXPIRE', KEYS[3], ARGV[1])
{_CHANGED}
"""
# Which of some keys are neither in the hash nor a queue that has something.
_MISSING = """
local missing = {}
for i, key in ipairs(ARGV) do
  if redis.call('HEXISTS', KEYS[1], key) == 0 and redis.call('EXISTS', KEYS[i + 1]) == 0 then
    missing[#missing + 1] = key
  end
end
return missing
"""
_LEAVE = """
if redis.call('INCR', KEYS[2]) < tonumber(ARGV[2]) then
  return redis.call('EXPIRE', KEYS[2], ARGV[1])
end
for _, queue in ipairs(redis.call('SMEMBERS', KEYS[3])) do redis.call('DEL', queue) end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
"""
# A world that gathers is a hash, KEYS[1]: its name, its size, and who has come. The last to come
# removes it, so that the next ones open another.
_ARRIVE = """
redis.call('HSETNX', KEYS[1], 'world', ARGV[2])
redis.call('HSETNX', KEYS[1], 'size', ARGV[4])
local world = redis.call('HGET', KEYS[1], 'world')
if redis.call('HSETNX', KEYS[1], 'rank ' .. ARGV[3], '') == 0 then return false end
if redis.call('HLEN', KEYS[1]) - 2 < tonumber(redis.call('HGET', KEYS[1], 'size')) then
  redis.call('EXPIRE', KEYS[1], ARGV[1])
else
  redis.call('DEL', KEYS[1])
end
return world
"""
_DEPART = """
if redis.call('HGET', KEYS[1], 'world') == ARGV[1] then
  redis.call('HDEL', KEYS[1], 'rank ' .. ARGV[2])
  if redis.call('HLEN', KEYS[1]) == 2 then redis.call('DEL', KEYS[1]) end
end
"""


class Server:
    """A way to a Redis server, for any number of threads. Errors are those of stores."""

    def __init__(self, url: str) -> None:
        self._redis = need("redis", "redis", "a store in Redis")
        retry = need("redis.backoff", "redis", "a store in Redis").NoBackoff()
        parts = urlsplit(url)
        self.address = f"{parts.hostname}:{parts.port or 6379}"
        make = partial(
            self._redis.Redis.from_url,
            url,
            # A lost answer does not say whether the question was heard: nothing is asked twice.
            retry=need("redis.retry", "redis", "a store in Redis").Retry(retry, 0),
            socket_connect_timeout=_BRISK,
            socket_keepalive=True,
            socket_keepalive_options=_KEEPALIVE,
        )
        try:
            self._clients = {limit: make(socket_timeout=limit) for limit in (_BRISK, _ANSWER)}
            self._blocking = make(socket_timeout=None)
        except ValueError as error:
            raise ValueError(f"a store in Redis: {error}") from None
        self._scripts: dict[str, Any] = {}
        self.do(_ANSWER, "PING")

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except self._redis.ConnectionError as error:
            # Also of those who were not let in: a wrong password, too many clients.
            raise DistNetworkError(
                f"lost the store in Redis at {self.address}, or could not reach it: {error}"
            ) from None
        except self._redis.TimeoutError:
            raise DistNetworkError(
                f"the store in Redis at {self.address} does not answer; is it there, and can it be "
                "reached?"
            ) from None
        except self._redis.ResponseError as error:
            if "integer" in str(error) or "overflow" in str(error):
                raise ValueError(
                    f"add: {error} (store in Redis at {self.address}); use add only on keys made "
                    "by add, or set to a decimal number of 64 bits"
                ) from None
            raise DistStoreError(f"the store in Redis at {self.address}: {error}") from None

    def _client(self, patience: float) -> Any:
        return self._clients[_BRISK if patience <= _BRISK else _ANSWER]

    def do(self, patience: float, *command: str | bytes | int) -> Any:
        """Return what the server answers to a command; `patience` is in seconds."""
        with self._asking():
            return self._client(patience).execute_command(*command)

    def run(
        self, patience: float, script: str, keys: Sequence[bytes], *arguments: str | bytes | int
    ) -> Any:
        """Return what a script answers, which the server runs as one operation."""
        with self._asking():
            client = self._client(patience)
            if script not in self._scripts:
                self._scripts[script] = client.register_script(script)
            return self._scripts[script](keys=keys, args=arguments, client=client)

    def pop(self, queue: bytes, limit: float) -> bytes | None:
        """Take the front of a queue, waiting for it; None if there is nothing in time."""
        with self._asking():
            found = self._blocking.blpop([queue], timeout=max(limit, 0.001))
        return None if found is None else bytes(found[1])

    @contextmanager
    def listening(self, channels: Sequence[bytes]) -> Iterator[Any]:
        """Hear of every message on these channels from here on."""
        with self._asking(), self._blocking.pubsub() as ear:
            ear.subscribe(*channels)
            for _ in channels:  # the server's word that it has understood
                ear.get_message(timeout=_ANSWER)
            yield lambda limit: ear.get_message(timeout=limit)

    def close(self) -> None:
        """Close all connections."""
        for client in (*self._clients.values(), self._blocking):
            client.close()


class Seat(NamedTuple):
    """Who came, to which world, and where it gathers."""

    place: str
    world: str
    rank: int


class User:
    """Stands for all handles of one user: when it goes, the user has gone."""


class RedisStore(Store):
    """Keep keys in a Redis or Valkey server that runs already; needs the extra phalanx[redis].

    `url` is ``redis://[user:password@]host[:port][/database]``, or ``rediss://`` with TLS, whose
    options (``ssl_ca_certs=...``) may follow as its query. Stores with the same `prefix` in one
    database are the same store. With `world_size` given, the last of that many users to go removes
    what is in it; whatever is not removed, the server forgets a week after its last change.
    """

    def __init__(
        self,
        url: str,
        prefix: str = "phalanx",
        world_size: int = -1,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__()
        self._seconds = seconds(timeout)
        self._enter(Server(url), prefix, world_size)

    def _enter(
        self,
        server: Server,
        prefix: str,
        world_size: int,
        meeting: Seat | None = None,
    ) -> None:
        self._share(server, prefix, User())
        weakref.finalize(self._user, _leave, server, self._keys(), world_size, meeting, os.getpid())

    def _share(self, server: Server, prefix: str, user: User) -> None:
        self._server = server
        self._user = user
        self._prefix = prefix
        self._name = prefix.encode()

    def _keys(self) -> list[bytes]:
        return [self._name, self._name + b":left", self._name + b":queues"]

    def _queue(self, key: bytes) -> bytes:
        return self._name + b":queue:" + key

    @property
    def prefix(self) -> str:
        """What the names of all its keys begin with, at the server."""
        return self._prefix

    def clone(self) -> RedisStore:
        twin = RedisStore.__new__(RedisStore)
        Store.__init__(twin)
        twin._share(self._server, self._prefix, self._user)
        twin._seconds = self._seconds
        return twin

    def __repr__(self) -> str:
        return f"RedisStore({self._server.address!r}, {self._prefix!r})"

    def set(self, key: str, value: str | bytes) -> None:
        self._server.run(self._seconds, _SET, [self._name], _KEPT, _key(key), _value(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            super().multi_set(keys, values)  # says so
        if keys:
            pairs = zip(_list(keys), map(_value, values), strict=True)
            self._server.run(
                self._seconds, _SET, [self._name], _KEPT, *[word for pair in pairs for word in pair]
            )

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        fields = _list(keys)
        if not fields:
            return []

        def values() -> list[bytes | None]:
            found: list[bytes | None] = self._server.do(self._seconds, "HMGET", self._name, *fields)
            return found

        def missing() -> list[bytes]:
            return [field for field, value in zip(fields, values(), strict=True) if value is None]

        found = values()
        while None in found:  # again if one is deleted in between
            self._await(fields, missing, self._seconds, "get")
            found = values()
        return [value for value in found if value is not None]

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        limit = self._seconds if timeout is None else seconds(timeout)
        fields = _list(keys)
        self._await(fields, lambda: self._missing(fields), limit, "wait")

    def check(self, keys: Sequence[str]) -> bool:
        return not self._missing(_list(keys))

    def _missing(self, fields: Sequence[bytes]) -> list[bytes]:
        queues = [self._queue(field) for field in fields]
        found: list[bytes] = self._server.run(
            self._seconds, _MISSING, [self._name, *queues], *fields
        )
        return found

    def _await(self, fields: Sequence[bytes], missing: Any, limit: float, what: str) -> None:
        deadline = time.monotonic() + limit
        lacking = missing()
        if not lacking:
            return
        if limit > 0:
            with self._server.listening([self._name + b":" + key for key in fields]) as hear:
                while (lacking := missing()) and (left := deadline - time.monotonic()) > 0:
                    hear(left)
        if lacking:
            names = ", ".join(f"'{key.decode()}'" for key in lacking[:8])
            more = f" and {len(lacking) - 8} more" if len(lacking) > 8 else ""
            raise StoreTimeout(
                f"{what}: nobody set {names}{more} within {limit:g} s (store in Redis at "
                f"{self._server.address}); look at the process that should have, or raise the "
                "timeout"
            )

    def add(self, key: str, amount: int) -> int:
        if isinstance(amount, bool) or not isinstance(amount, int):
            raise TypeError(f"add: amount must be an int, not {type(amount).__name__}")
        return int(self._server.run(self._seconds, _ADD, [self._name], _KEPT, _key(key), amount))

    def append(self, key: str, value: str | bytes) -> None:
        self._server.run(self._seconds, _APPEND, [self._name], _KEPT, _key(key), _value(value))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        words = _key(key), _value(expected_value), _value(desired_value)
        return bytes(self._server.run(self._seconds, _COMPARE_SET, [self._name], _KEPT, *words))

    def delete_key(self, key: str) -> bool:
        return bool(self._server.do(self._seconds, "HDEL", self._name, _key(key)))

    def num_keys(self) -> int:
        return int(self._server.do(self._seconds, "HLEN", self._name))

    def list_keys(self) -> list[str]:
        return [key.decode() for key in self._server.do(self._seconds, "HKEYS", self._name)]

    def has_extended_api(self) -> bool:
        return True

    def queue_push(self, key: str, value: str | bytes) -> None:
        name = _key(key)
        keys = [self._name, self._queue(name), self._keys()[2]]
        self._server.run(self._seconds, _PUSH, keys, _KEPT, name, _value(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        queue = self._queue(_key(key))
        found: bytes | None = self._server.do(self._seconds, "LPOP", queue)
        if found is not None:
            return found
        where = f"(store in Redis at {self._server.address})"
        if not block:
            raise DistQueueEmptyError(f"queue_pop: queue '{key}' is empty {where}")
        found = self._server.pop(queue, self._seconds)
        if found is None:
            raise StoreTimeout(
                f"queue_pop: nothing was pushed to queue '{key}' within {self._seconds:g} s "
                f"{where}; look at the process that should have, or raise the timeout"
            )
        return found

    def queue_len(self, key: str) -> int:
        return int(self._server.do(self._seconds, "LLEN", self._queue(_key(key))))


def meet(url: str, job: str, rank: int, world_size: int, timeout: Timeout) -> RedisStore:
    """Return a store that the ranks of a job share with nobody else.

    Ranks that come are put together until there are `world_size`; those that come then begin
    another world.
    """
    server = Server(url)
    place = f"phalanx:{job}"
    limit = max(int(seconds(timeout)), 1)  # whoever has come gives up then
    world = server.run(
        _ANSWER, _ARRIVE, [place.encode()], limit, secrets.token_hex(8), rank, world_size
    )
    if world is None:
        server.close()
        raise DistError(
            f"rank {rank} of {world_size}: two processes claim to be rank {rank} of the job "
            f"'{job}' (store in Redis at {server.address}); or one that was killed while it waited "
            f"for the others did, which is forgotten after {limit} s: name jobs apart, as in "
            "redis://host/0?job=NAME"
        )
    store = RedisStore.__new__(RedisStore)
    Store.__init__(store)
    store.set_timeout(timeout)
    name = world.decode()
    store._enter(server, f"{place}:{name}", world_size, Seat(place, name, rank))
    return store


def split_url(url: str) -> tuple[str, dict[str, str]]:
    """Return a URL as the server is reached by, and what its query says to Phalanx."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    names = {"job", "rank", "world_size"} & query.keys()
    ours = {name: query.pop(name) for name in names}
    return parts._replace(query=urlencode(query)).geturl(), ours


def _leave(
    server: Server,
    keys: list[bytes],
    world_size: int,
    meeting: Seat | None,
    process: int,
) -> None:
    """Take a user off the store, and with the last one what is in it."""
    if os.getpid() != process:
        return  # a forked child is no user of its own
    with suppress(DistError):
        if meeting is not None:
            server.run(_BRISK, _DEPART, [meeting.place.encode()], meeting.world, meeting.rank)
        if world_size > 0:
            server.run(_BRISK, _LEAVE, keys, _KEPT, world_size)
    server.close()


def _key(key: str) -> bytes:
    if not isinstance(key, str):
        raise TypeError(f"store: a key must be str, not {type(key).__name__}")
    return key.encode()


def _list(keys: Sequence[str]) -> list[bytes]:
    if isinstance(keys, str):
        raise TypeError("store: keys must be a list, not str")
    return [_key(key) for key in keys]


def _value(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes):
        raise TypeError(f"store: a value must be str or bytes, not {type(value).__name__}")
    return value
